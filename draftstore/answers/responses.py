"""Responses: a model's own answers to prompts, as a corpus for stores of what the model itself writes.

    {"id", "model", "decoding": {...}, "prompt": [messages], "output": "...", "messages": [prompt and output]}
    {"id", "model", "decoding": {...}, "prompt": "...", "output": "...", "text": "prompt and output"}

`draftstore build --corpus` reads `messages` or `text`, `draftstore replay` reads `prompt` and `output`. The answers of
the worker's response log can be taken over: no decoding is as cheap as that which has been done.

In the working directory `.NAME.partial` beside the output lie

    plan.json        what is decoded; another model, other prompts or settings are refused, or start clean
    answers.jsonl    a line for every batch that is done, flushed to disk; half a line is cut off

so that a run that was killed goes on after its last batch, and writes the same bytes. Beside the output lies
`NAME.origin`: what made it, and figures. Nothing here imports torch before an answer is decoded.
"""

import dataclasses
import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from draftstore.answers.journal import Journal
from draftstore.answers.records import (
    OnProgress,
    ResponseOptions,
    decode_answers,
    decoded_records,
    logged_records,
    read_questions,
)
from draftstore.errors import BuildError, CorpusError, DraftstoreError, NoTextError
from draftstore.hf.loading import load_model, model_name
from draftstore.storage.files import fsync_path, hash_file, locked_directory, remove, write_json
from draftstore.storage.report import RecordProblem
from draftstore.storage.streams import write_lines
from draftstore.text.records import kind_of_name

__all__ = ["ResponseOptions", "Responses", "make_responses", "response_plan"]

BATCH = 64
FORMAT = 1
PLAN, JOURNAL, FINISHED = "plan.json", "answers.jsonl", "finished"
ORIGIN = ".origin"
COUNTS = (
    *("answers", "decoded", "logged", "tokens", "cut"),
    *("empty", "special", "too_long", "repeated", "bad_records", "other_models"),
)


@dataclasses.dataclass(frozen=True)
class Responses:
    """Finished answers.

    Attributes:
        path: the file.
        counts: `answers` in the file, of them `decoded` and `logged`; `tokens` decoded; `cut` answers that are as long
            as they may be; and left out: `empty`, `special` (they spell a special token), `too_long`, `repeated`,
            `bad_records`, `other_models`.
        problems: the first bad records, where they were met.
        reused: the file was there already.
    """

    path: Path
    counts: dict[str, int]
    problems: list[RecordProblem]
    reused: bool


def make_responses(
    options: ResponseOptions,
    model: str | Path,
    out: Path,
    *,
    dtype: str | None = None,
    device: str | None = None,
    batch: int = BATCH,
    overwrite: bool = False,
    on_progress: OnProgress = lambda _done, _all, _tokens: None,
) -> Responses:
    """Write a model's answers, go on with an interrupted run of the same, or return the file that is there.

    Args:
        options: what is answered, and how.
        model: see `load_model`; it is loaded only if there is something to decode.
        out: the file: .jsonl, .ndjson or .json, also packed (.gz, .zst).
        dtype: of the weights; see `load_model`.
        device: where it runs.
        batch: answers that are decoded at once; halved where memory does not suffice.
        overwrite: replace answers of another model, to other prompts or with other settings, finished or not; those of
            this very run are kept, for they would be the same again.
        on_progress: told how far it is.

    Raises:
        BuildError: `out` holds something else, or another run is at work there.
        CorpusError: prompts or logs cannot be read, or nothing is left of them.
        ModelError: the model cannot be loaded, or does not fit.
    """
    options.check()
    if kind_of_name(out.name) != "lines":
        raise BuildError(
            f"{out} is not a name for JSON Lines: choose one that ends in .jsonl, .jsonl.gz or .jsonl.zst"
        )
    out = Path(os.path.abspath(out))  # noqa: PTH100 (resolve() would follow a link that should be replaced)
    plan = response_plan(options, model, dtype)
    partial = out.with_name(f".{out.name}.partial")
    found = _find_finished(out, plan, overwrite)
    if found is not None and not (partial / FINISHED).exists():
        return found
    with locked_directory(partial):
        # Asked again: another run may have ended between the question and the lock.
        found = found or _find_finished(out, plan, overwrite)
        if found is None:
            # A log grows while answers are decoded: that is no reason to decode them again.
            _start(partial, {**plan, "logs": len(plan["logs"])}, overwrite)
            try:
                found = _make(options, model, out, partial, plan, (dtype, device), batch, on_progress)
            except DraftstoreError:
                if not _has_answers(partial):
                    remove(partial)
                raise
        remove(partial)
    return found


def response_plan(options: ResponseOptions, model: str | Path, dtype: str | None) -> dict[str, Any]:
    """Return what decides the answers, as JSON values.

    Raises:
        CorpusError: no such file of prompts or log.
    """
    for path in (*options.prompts, *options.logs):
        if not path.is_file():
            raise CorpusError(f"no such file: {path}")
    keys = ("samples", "max_prompt_tokens", "limit", "system", "chat", "logged_as")
    return {
        "format": FORMAT,
        "model": model_name(model),
        "weights": weights_fingerprint(model),
        "dtype": dtype,
        "prompts": [hash_file(path) for path in options.prompts],
        "logs": [hash_file(path) for path in options.logs],
        "decoding": options.decoding,
        **{key: getattr(options, key) for key in keys},
    }


def weights_fingerprint(model: str | Path) -> str | None:
    """Return a cheap identity of a model on disk, over its files' names, sizes and times; None of one on the hub."""
    path = Path(model)
    if not path.exists():
        return None
    files = sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else [path]
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.sha256(json.dumps(stats).encode()).hexdigest()


def _find_finished(out: Path, plan: dict[str, Any], overwrite: bool) -> Responses | None:
    """Return the answers at `out` that this very plan made; None if there are some to make.

    Raises:
        BuildError: something else is there, and may not be replaced.
    """
    if not os.path.lexists(out):
        return None
    origin = _read_origin(out)
    if origin is None:
        raise BuildError(f"{out} exists and was not written by `draftstore responses`: choose another --out")
    if origin["plan"] == plan and origin["sha256"] == hash_file(out):
        return Responses(out, origin["counts"], [], reused=True)
    if not overwrite:
        raise BuildError(f"{out} exists and holds other answers: choose another --out, or pass --overwrite")
    return None


def _read_origin(out: Path) -> dict[str, Any] | None:
    """Return what is told of a file of answers, or None."""
    try:
        found = json.loads(origin_path(out).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and {"plan", "sha256", "counts"} <= found.keys() else None


def origin_path(out: Path) -> Path:
    """Return where it is told what made a file of answers."""
    return out.with_name(out.name + ORIGIN)


def _start(partial: Path, plan: dict[str, Any], overwrite: bool) -> None:
    """Empty the working directory unless it is of this run.

    Raises:
        BuildError: it holds answers of another model or with other settings.
    """
    marker, state = partial / PLAN, {"format": FORMAT, **plan}
    try:
        found = json.loads(marker.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        found = None
    if found == state:
        return
    if found is not None and _has_answers(partial) and not overwrite:
        others = ", ".join(key for key in sorted(state) if found.get(key) != state[key])
        raise BuildError(
            f"{partial} holds unfinished answers that differ in {others}: repeat that command to resume, "
            "choose another --out, or pass --overwrite to start again"
        )
    for path in partial.iterdir():
        remove(path)
    write_json(marker, state)


def _has_answers(partial: Path) -> bool:
    """Tell whether there is anything to go on from."""
    journal = partial / JOURNAL
    return journal.exists() and journal.stat().st_size > 0


def _make(
    options: ResponseOptions,
    model: str | Path,
    out: Path,
    partial: Path,
    plan: dict[str, Any],
    place: tuple[str | None, str | None],
    batch: int,
    on_progress: OnProgress,
) -> Responses:
    """Decode what is not decoded yet, and publish all of it with what the logs hold."""
    counts = Counter(dict.fromkeys(COUNTS, 0))
    problems: list[RecordProblem] = []
    records: Iterator[dict[str, Any]] = iter(())
    if options.prompts:
        loaded = load_model(model, dtype=place[0], device=place[1])
        prompts, report = read_questions(options, loaded)
        counts.update(bad_records=report.bad_records, repeated=report.repeated, too_long=report.too_long)
        problems += report.problems
        with Journal(partial / JOURNAL) as journal:
            decode_answers(options, loaded, prompts, journal, batch, on_progress)
        records = decoded_records(options, loaded, prompts, journal.answers, counts)
    logged = logged_records(options, options.logged_as or plan["model"], counts, problems)
    _publish(out, partial, plan, chain(records, logged), counts)
    return Responses(out, dict(counts), problems, reused=False)


def _publish(
    out: Path, partial: Path, plan: dict[str, Any], records: Iterator[dict[str, Any]], counts: "Counter[str]"
) -> None:
    """Write the records beside their place, then tell what made them, then give the file its name.

    Raises:
        NoTextError: there are none.
    """
    file = partial / out.name
    if plan["logs"]:
        file.touch(0o600)  # as the logs: for their owner's eyes
    lines = (json.dumps(record, ensure_ascii=False).encode(errors="backslashreplace") for record in records)
    write_lines(file, lines)
    counts["answers"] = counts["decoded"] + counts["logged"]
    if not counts["answers"]:
        left_out = ", ".join(
            f"{key.replace('_', ' ')} {number:,}" for key, number in counts.items() if number
        )
        raise NoTextError(f"no answer for {out}" + f": {left_out}" * bool(left_out))
    write_json(origin_path(out), {"plan": plan, "sha256": hash_file(file), "counts": dict(counts)})
    (partial / FINISHED).touch()
    file.rename(out)
    fsync_path(out.parent)
