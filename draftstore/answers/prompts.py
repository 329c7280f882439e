"""Prompts from JSON Lines files, as text or conversations and as the token ids that the model sees.

A record has `prompt` (a text, or a list of messages), or `messages` or `conversations` (the turns before the
assistant's first one are the prompt, so all answers in the output are the model's own), or `text`.
"""

import sys
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from draftstore.decoding.conversation import Content, encode_conversation
from draftstore.errors import CorpusError, TokenizerError, type_name
from draftstore.hf.loading import LoadedModel
from draftstore.hf.requests import Drawing
from draftstore.options import Shown
from draftstore.storage.report import ReadReport, RecordProblem
from draftstore.text.chat import as_messages
from draftstore.text.records import CONVERSATIONS, read_objects, record_id

KEYS = ("prompt", *CONVERSATIONS, "text")


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


class Prompt(NamedTuple):
    """One prompt: the record's id, else its position `file#line`; a text or conversation; its ids, int32 [n]."""

    id: str
    content: Content
    ids: NDArray[np.int32]


def read_prompts(
    options: ResponseOptions, loaded: LoadedModel
) -> tuple[list[Prompt], Counter[str], list[RecordProblem]]:
    """Read the prompts of JSON Lines files for a model.

    Returns:
        The distinct prompts, once per sample; counts of skipped ones by reason; the first bad records.

    Raises:
        CorpusError: a file is not JSON Lines or, with `strict`, has a bad record.
    """
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
