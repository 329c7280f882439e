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
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import chain, islice
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from draftstore.decoding.budget import Fixed
from draftstore.decoding.conversation import Content, Pieces, answer_lead, encode_conversation
from draftstore.errors import (
    BuildError,
    CorpusError,
    DraftstoreError,
    ModelError,
    NoTextError,
    TokenizerError,
    counted,
    type_name,
)
from draftstore.hf.loading import LoadedModel, load_model, weights_fingerprint
from draftstore.hf.requests import Drawing, GenerationRequest, Sampling
from draftstore.options import Options, Shown
from draftstore.storage.files import hash_file, locked_directory, remove, replacing, write_json
from draftstore.storage.manifest import model_name
from draftstore.storage.report import OnProgress, ReadReport, RecordProblem, ignore
from draftstore.storage.streams import write_lines
from draftstore.stores.kind import ModelChoice, Weights
from draftstore.text.chat import as_messages
from draftstore.text.records import CONVERSATIONS, kind_of_name, read_objects, record_id

KEYS = ("prompt", *CONVERSATIONS, "text")
"""Keys of a prompt in a record, the first that it has; of whole conversations, the turns before the first answer."""
BATCH = 64
COUNTS = ("answers", "tokens", "cut", "empty", "special", "too_long", "repeated", "bad_records")
"""Answers in the file; tokens decoded; answers cut at the maximum length; and skipped items: empty answers, answers
that spell a special token, prompts that are too long or repeated, and bad records."""


class ResponseOptions(Drawing):
    """Prompts for a model, and how it answers them."""

    prompts: Annotated[tuple[Path, ...], Shown(metavar="FILE...")] = Field(
        min_length=1,
        description="JSON Lines (.jsonl, .ndjson, .json; compressed: .gz, .bz2, .xz, .zst) with `prompt` (a text or "
        "messages), `messages` or `conversations` (the turns before the assistant's first are the prompt), or `text`; "
        "may be repeated.",
        examples=[["/data/prompts.jsonl.zst"]],
    )
    max_tokens: int = Field(128, ge=1, description="Maximum number of tokens in an answer.")
    samples: int = Field(
        1, ge=1, description="Number of answers to each prompt; several need a temperature above 0."
    )
    seed: int = Field(0, ge=0, lt=2**63, description="Seed of the random numbers.")
    max_prompt_tokens: Annotated[int | None, Shown(unset="what the model has room for")] = Field(
        None, ge=1, description="Skip prompts with more tokens."
    )
    limit: int | None = Field(None, ge=1, description="Maximum number of prompts.")
    chat: Annotated[bool | None, Shown(flags=("--chat/--raw",), unset="the template if there is one")] = (
        Field(None, description="Ask texts in the model's chat template, or continue them as they are.")
    )
    strict: bool = Field(False, description="Stop at the first bad record instead of counting it.")

    @model_validator(mode="after")
    def _different(self) -> Self:
        if self.samples > 1 and not self.temperature:
            raise ValueError(f"{self.samples} samples at temperature 0 are all the same: set a temperature")
        return self


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


class Prompt(NamedTuple):
    """One prompt: the record's id, else its position `file#line`; a text or conversation; its ids, int32 [n]."""

    id: str
    content: Content
    ids: NDArray[np.int32]


class Journal:
    """Finished answers by number, in `answers` and in a file."""

    def __init__(self, path: Path) -> None:
        """Read the journal of an earlier run; an incomplete last line is removed."""
        self.answers: dict[int, StoredAnswer] = {}
        self._path, whole = path, 0
        with path.open("a+b") as file:
            file.seek(0)
            for line in file:
                try:
                    answer = StoredAnswer(*json.loads(line[: line.index(b"\n")]))
                except (TypeError, ValueError):
                    break
                self.answers[answer.number] = answer
                whole += len(line)
            file.truncate(whole)

    def add(self, answer: StoredAnswer) -> None:
        """Append an answer, which is on disk on return; after an OSError, the next run removes the partial line."""
        with self._path.open("ab") as file:
            file.write(json.dumps(answer).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
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
    """Write a model's answers to a file, resume an interrupted run of them, or return the existing file.

    The model is loaded only if the file does not exist; `overwrite` replaces other answers.

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
    journal = Journal(work / f"{digest}.answers")
    _decode(options, loaded, prompts, journal, batch, on_progress)
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


def read_prompts(
    options: ResponseOptions, loaded: LoadedModel
) -> tuple[list[Prompt], Counter[str], list[RecordProblem]]:
    """Return a model's distinct prompts, once per sample; counts of skipped ones by reason; the first bad records."""
    chat = loaded.text.has_chat_template if options.chat is None else options.chat
    most = [loaded.positions and loaded.positions - options.max_tokens, options.max_prompt_tokens]
    longest = min((tokens for tokens in most if tokens is not None), default=sys.maxsize)
    found, skipped, report = dict[bytes, Prompt](), Counter[str](), ReadReport()
    for place, record in chain.from_iterable(map(read_objects, options.prompts)):
        try:
            prompt = _prompt(place, record, loaded, chat)
        except (CorpusError, TokenizerError) as error:
            if options.strict:
                raise CorpusError(f"{place}: {error}") from None
            skipped["bad_records"] += 1
            report.add_problem(RecordProblem(place, str(error)))
            continue
        if len(prompt.ids) > longest:
            skipped["too_long"] += 1
        elif found.setdefault(prompt.ids.tobytes(), prompt) is not prompt:
            skipped["repeated"] += 1
        if len(found) == options.limit:
            break
    prompts = list(found.values())
    if options.samples > 1:
        numbers = range(options.samples)
        prompts = [prompt._replace(id=f"{prompt.id}#{number}") for prompt in prompts for number in numbers]
    return prompts, skipped, report.problems


def _prompt(place: str, record: dict[str, Any] | RecordProblem, loaded: LoadedModel, chat: bool) -> Prompt:
    """Return the prompt of a record; CorpusError or TokenizerError if it has none."""
    if isinstance(record, RecordProblem):
        raise CorpusError(record.reason)
    key = next((key for key in KEYS if key in record), None)
    if key is None:
        raise CorpusError(f"has none of {', '.join(map(repr, KEYS))}")
    value = record[key]
    if not isinstance(value, str | list):
        raise CorpusError(f"{key!r} is {type_name(value)}, expected text or a list of messages")
    messages = as_messages([{"role": "user", "content": value}] if isinstance(value, str) else value, key)
    roles = [message["role"] for message in messages]
    if key != "prompt" and "assistant" in roles:
        messages = messages[: roles.index("assistant")]
    if not any(message["content"].strip() for message in messages):
        raise CorpusError(f"{key!r} holds no question")
    content = value if isinstance(value, str) and not chat else messages
    ids = encode_conversation(loaded.text, content)
    if not len(ids):
        raise TokenizerError("the prompt is empty, but the model needs at least one token")
    return Prompt(record_id(record) or Path(place).name.replace(":line ", "#"), content, ids)


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


def _decode(
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
        journal.add(_finish(loaded, prompts[number], number, tokens, options.max_tokens))
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


def _finish(loaded: LoadedModel, prompt: Prompt, number: int, tokens: list[int], most: int) -> StoredAnswer:
    """Return an answer of at most `most` tokens as text: what they add to the prompt, without end token and lead-in."""
    ended = len(tokens) < most
    if tokens[-1] in loaded.ends:
        tokens, ended = tokens[:-1], True
    pieces = Pieces(loaded.text, prompt.ids)
    text = "".join([pieces.push(token) for token in tokens]) + pieces.finish()
    text = text.removeprefix(answer_lead(loaded.text, prompt.content))
    return StoredAnswer(number, text, len(tokens), ended)
