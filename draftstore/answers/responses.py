"""Responses: a model's own answers to prompts, as a corpus for its stores.

    {"id", "model", "decoding": {...}, "prompt": [messages], "output": "...", "messages": [prompt and output]}
    {"id", "model", "decoding": {...}, "prompt": "...", "output": "...", "text": "prompt and output"}

`draftstore build --corpus` reads `messages` or `text`, `draftstore replay` reads `prompt` and `output`. Answers in the
worker's response log can be copied, which saves decoding them.

The working directory `.NAME.partial` beside the output contains

    plan.json        what is decoded; another model, other prompts or settings are refused or start anew
    answers.jsonl    one line per finished batch, flushed to disk; an incomplete last line is cut off

so that a killed run resumes after its last batch and writes the same bytes. Beside the output lies `NAME.origin`: its
origin, and figures. Nothing here imports torch before an answer is decoded.
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
        path: path of the file.
        counts: `answers` in the file, of which `decoded` and `logged`; `tokens` decoded; `cut` answers that reached the
            maximum length; and skipped ones: `empty`, `special` (they spell a special token), `too_long`, `repeated`,
            `bad_records`, `other_models`.
        problems: the first bad records, if this run met them.
        reused: whether the file existed already.
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
    """Write a model's answers, resume an interrupted run of them, or return the existing file.

    Args:
        options: prompts and settings.
        model: see `load_model`; loaded only if there is something to decode.
        out: the file: .jsonl, .ndjson or .json, optionally compressed (.gz, .zst).
        dtype: type of the weights; see `load_model`.
        device: device of the model.
        batch: answers decoded at once; halved when memory runs out.
        overwrite: whether to replace answers of another model, to other prompts or with other settings, finished or
            not; those of the same run are kept, since they would be identical.
        on_progress: progress callback.

    Raises:
        BuildError: `out` is something else, or another run is active there.
        CorpusError: prompts or logs cannot be read, or no answers are left.
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
        # Checked again: another run may have ended just before the lock was taken.
        found = found or _find_finished(out, plan, overwrite)
        if found is None:
            # A log may grow during decoding; the decoded answers stay valid.
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
    """Return everything that determines the answers, as JSON values."""
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
    """Return a cheap identity of a model on disk, from its files' names, sizes and times; None for hub models."""
    path = Path(model)
    if not path.exists():
        return None
    files = sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else [path]
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.sha256(json.dumps(stats).encode()).hexdigest()


def _find_finished(out: Path, plan: dict[str, Any], overwrite: bool) -> Responses | None:
    """Return the answers at `out` with the same plan; None if they must be made."""
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
    """Return the origin of an answer file, or None."""
    try:
        found = json.loads(origin_path(out).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and {"plan", "sha256", "counts"} <= found.keys() else None


def origin_path(out: Path) -> Path:
    """Return the path of an answer file's origin."""
    return out.with_name(out.name + ORIGIN)


def _start(partial: Path, plan: dict[str, Any], overwrite: bool) -> None:
    """Empty the working directory unless it belongs to this run."""
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
    """Return True if there is anything to resume from."""
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
    """Decode missing answers, and publish all of them with those from the logs."""
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
    """Write the records to a temporary file, then their origin, then rename the file."""
    file = partial / out.name
    if plan["logs"]:
        file.touch(0o600)  # like the logs: readable by their owner only
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
