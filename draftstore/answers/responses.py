"""Responses: a model's own answers to prompts, as a corpus for its stores.

    {"id", "model", "prompt": [messages], "output": "...", "messages": [prompt and output]}
    {"id", "model", "prompt": "...", "output": "...", "text": "prompt and output"}

`draftstore build --corpus` reads `messages` or `text`, `draftstore replay` reads `prompt` and `output`. `NAME.origin`
next to the file records its plan and figures.

Until the file is finished, answers are in a journal in `.NAME.partial` next to it, so that a killed run resumes after
its last answer. A journal is named by a hash of its plan: a different model, prompts or settings get another journal.

Answers join a batch as room becomes available, longest prompts first. Each has its own random numbers, so neither the
batch nor an interruption changes samples, except for rounding.
"""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic import Field

from draftstore.answers.prompts import Prompt, ResponseOptions, read_prompts
from draftstore.decoding.budget import Fixed
from draftstore.decoding.conversation import Pieces, answer_lead
from draftstore.errors import BuildError, CorpusError, DraftstoreError, ModelError, NoTextError, counted
from draftstore.hf.loading import LoadedModel, load_model
from draftstore.hf.requests import GenerationRequest, Sampling
from draftstore.options import Options
from draftstore.storage.files import hash_file, locked_directory, remove, replacing, write_json
from draftstore.storage.manifest import model_name
from draftstore.storage.report import OnProgress, RecordProblem, ignore
from draftstore.storage.streams import write_lines
from draftstore.stores.kind import ModelChoice, Weights
from draftstore.text.records import kind_of_name

__all__ = ["ResponseOptions", "Responses", "make_responses", "weights_fingerprint"]

BATCH = 64
COUNTS = ("answers", "tokens", "cut", "empty", "special", "too_long", "repeated", "bad_records")
"""Answers in the file; tokens decoded; answers cut at the maximum length; and skipped items: empty answers, answers
that spell a special token, prompts that are too long or repeated, and bad records."""


class Batching(Options):
    """How many answers are decoded together."""

    batch: int = Field(
        BATCH, ge=1, description="Number of answers decoded at once, at most 64.", examples=[64]
    )


class Responder(ModelChoice, Batching):
    """The model that answers, and how."""

    dtype: Weights = Field(None, description="Data type of the weights.")


class Responses(NamedTuple):
    """Finished answers: their file, `COUNTS` by name, the first bad records, and whether the file existed already."""

    path: Path
    counts: dict[str, int]
    problems: list[RecordProblem]
    reused: bool


class StoredAnswer(NamedTuple):
    """One answer: its number, text, token count, and whether the model ended it, rather than a limit."""

    number: int
    text: str
    tokens: int
    ended: bool


class Journal:
    """Finished answers by number, in `answers` and in a file."""

    def __init__(self, path: Path) -> None:
        """Read the journal of an earlier run; an incomplete last line is removed."""
        self.answers: dict[int, StoredAnswer] = {}
        self._file = path.open("a+b")
        self._file.seek(0)
        whole = 0
        for line in self._file:
            try:
                answer = StoredAnswer(*json.loads(line[: line.index(b"\n")]))
            except (TypeError, ValueError):
                break
            self.answers[answer.number] = answer
            whole += len(line)
        self._file.truncate(whole)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def add(self, answer: StoredAnswer) -> None:
        """Append an answer, which is on disk on return; after an OSError, the next run removes the partial line."""
        self._file.write(json.dumps(answer).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self.answers[answer.number] = answer


def make_responses(
    options: ResponseOptions,
    model: str | Path,
    out: Path,
    *,
    dtype: str | None = None,
    device: str | None = None,
    batch: int = BATCH,
    overwrite: bool = False,
    on_progress: OnProgress = ignore,
) -> Responses:
    """Write a model's answers, resume an interrupted run of them, or return the existing file.

    Args:
        options: prompts and settings.
        model: see `load_model`, as for `dtype` and `device`; loaded only if the file does not exist.
        out: the file: .jsonl, .ndjson or .json, optionally compressed (.gz, .bz2, .xz, .zst).
        batch: answers decoded at once, at most 64.
        overwrite: whether to replace answers of another model, to other prompts or with other settings.
        on_progress: called with the answers done and their total.

    Raises:
        BuildError: `out` is another file, or another run is active there.
        CorpusError: prompts cannot be read, or no answers are left.
        ModelError: the model cannot be loaded, or the answers do not fit into memory.
    """
    if kind_of_name(out.name) != "lines":
        raise BuildError(
            f"{out} is not a name for JSON Lines: choose one that ends in .jsonl, .jsonl.gz or .jsonl.zst"
        )
    out = Path(os.path.abspath(out))  # noqa: PTH100 (resolve() would follow a link that should be replaced)
    plan, work = _plan(options, model, dtype), out.with_name(f".{out.name}.partial")
    with locked_directory(work):
        try:
            made = _find_finished(out, plan, overwrite)
            if made is None:
                loaded = load_model(model, dtype=dtype, device=device)
                made = _make(options, loaded, plan, work, out, batch, on_progress)
        except DraftstoreError:
            if not any(journal.stat().st_size for journal in work.glob("*.answers")):
                remove(work)
            raise
        remove(work)
    return made


def _plan(options: ResponseOptions, model: str | Path, dtype: str | None) -> dict[str, Any]:
    """Return everything that determines the answers, as JSON values."""
    for path in options.prompts:
        if not path.is_file():
            raise CorpusError(f"no such file: {path}")
    return {
        **dict(options),
        "strict": None,  # does not affect answers
        "model": model_name(model),
        "weights": weights_fingerprint(model),
        "dtype": dtype,
        "prompts": [hash_file(path) for path in options.prompts],
    }


def weights_fingerprint(model: str | Path) -> str | None:
    """Return a cheap fingerprint of a model on disk, from its files' names, sizes and times; None for hub models."""
    path = Path(model)
    if not path.exists():
        return None
    files = sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else [path]
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.sha256(json.dumps(stats).encode()).hexdigest()


def _find_finished(out: Path, plan: dict[str, Any], overwrite: bool) -> Responses | None:
    """Return the answers at `out` if they have the same plan; None if they must be generated."""
    if not os.path.lexists(out):
        return None
    try:
        origin = json.loads(out.with_name(f"{out.name}.origin").read_bytes())
        if origin["plan"] == plan and origin["sha256"] == hash_file(out):
            return Responses(out, origin["counts"], [], reused=True)
    except (LookupError, OSError, ValueError):
        raise BuildError(
            f"{out} was not written by `draftstore responses`: choose another file", "out"
        ) from None
    if not overwrite:
        raise BuildError(
            f"{out} exists and holds other answers: choose another file, or replace it", "overwrite"
        )
    return None


def _make(
    options: ResponseOptions,
    loaded: LoadedModel,
    plan: dict[str, Any],
    work: Path,
    out: Path,
    batch: int,
    on_progress: OnProgress,
) -> Responses:
    """Decode the answers missing from the journal, and publish all: first their origin, then the file by a rename."""
    prompts, counts, problems = read_prompts(options, loaded)
    digest = hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()[:16]
    with closing(Journal(work / f"{digest}.answers")) as journal:
        decode_answers(options, loaded, prompts, journal, batch, on_progress)
    answers = [answer for _, answer in sorted(journal.answers.items())]
    with replacing(out) as file:
        write_lines(file, _lines(loaded, prompts, answers, counts), out.suffix)
        if not counts["answers"]:
            reasons = ", ".join(f"{key.replace('_', ' ')} {counts[key]:,}" for key in counts if counts[key])
            raise NoTextError(f"no answer for {out}: {reasons or 'no prompt'}")
        figures = {name: counts[name] for name in COUNTS}
        origin = {"plan": plan, "sha256": hash_file(file), "counts": figures}
        write_json(out.with_name(f"{out.name}.origin"), origin)
    return Responses(out, figures, problems, reused=False)


def _lines(
    loaded: LoadedModel, prompts: Sequence[Prompt], answers: Sequence[StoredAnswer], counts: Counter[str]
) -> Iterator[bytes]:
    specials = [loaded.text.decode([token]) for token in sorted(loaded.text.special_ids)]
    for number, text, tokens, ended in answers:
        counts["tokens"] += tokens
        if not text.strip():
            counts["empty"] += 1
        elif any(special and special in text for special in specials):
            counts["special"] += 1  # a tokenizer would read it as the token
        else:
            counts["answers"] += 1
            counts["cut"] += not ended
            name, content, _ = prompts[number]
            record = {"id": name, "model": loaded.name, "prompt": content, "output": text}
            if isinstance(content, str):
                record["text"] = content + text
            else:
                record["messages"] = [*content, {"role": "assistant", "content": text}]
            yield json.dumps(record, ensure_ascii=False).encode(errors="backslashreplace")


def decode_answers(
    options: ResponseOptions,
    loaded: LoadedModel,
    prompts: Sequence[Prompt],
    journal: Journal,
    most: int,
    on_progress: OnProgress,
) -> None:
    """Decode answers missing from a journal, at most `most` at once; ModelError if they do not fit into memory."""
    left = [number for number in range(len(prompts)) if number not in journal.answers]
    left.sort(key=lambda number: -len(prompts[number].ids))
    requests = {number: _request(options, prompts[number], number) for number in left}
    decoded = 0
    on_progress(len(journal.answers), len(prompts), counted(decoded, "token"))
    for number, tokens in _together(loaded, requests, most) if requests else ():
        decoded += len(tokens)
        limited = len(tokens) == options.max_tokens
        journal.add(_finish(loaded, prompts[number], number, tokens, limited))
        on_progress(len(journal.answers), len(prompts), counted(decoded, "token"))


def _request(options: ResponseOptions, prompt: Prompt, number: int) -> GenerationRequest:
    seed = int(np.random.SeedSequence((options.seed, number)).generate_state(1, np.uint64)[0])
    sampling = Sampling(options.temperature, options.top_p, seed=seed)
    return GenerationRequest(prompt.ids, options.max_tokens, sampling)


def _together(
    loaded: LoadedModel, requests: dict[int, GenerationRequest], most: int
) -> Iterator[tuple[int, list[int]]]:
    """Decode answers in a batch; yield the number and the tokens of each when it ends."""
    from draftstore.hf.answering import batch_member  # imports torch
    from draftstore.hf.batches import Batch

    longest = max(len(request.prompt) + request.max_tokens for request in requests.values())
    left, members = iter(requests.items()), {}
    with closing(Batch(loaded.model, most=most)) as batch:
        if longest > batch.positions:
            raise ModelError(
                f"no memory for {batch.most} answers of up to {longest:,} tokens with prompts: decode fewer together"
            )
        while True:
            for number, request in islice(left, batch.most - len(batch)):
                member = batch_member(loaded, request, drafter=None, planner=Fixed(0))
                batch.join(member)
                members[member] = number
            if not members:
                return
            for member, result in batch.step():
                if isinstance(result, Exception):
                    raise result
                if member.over:
                    yield members.pop(member), member.text.ids[len(member.prompt) :].tolist()


def _finish(
    loaded: LoadedModel, prompt: Prompt, number: int, tokens: list[int], limited: bool
) -> StoredAnswer:
    """Return an answer's text: what the ids add to the prompt, without end token and lead-in."""
    ended = tokens[-1] in loaded.ends
    tokens, ended = (tokens[:-1] if ended else tokens), ended or not limited
    pieces = Pieces(loaded.text, prompt.ids)
    text = "".join([pieces.push(token) for token in tokens]) + pieces.finish()
    return StoredAnswer(
        number, text.removeprefix(answer_lead(loaded.text, prompt.content)), len(tokens), ended
    )
