"""Prompts from JSON Lines files, as text or conversations and as the token ids that the model sees.

A record has `prompt` (a text, or a list of messages), or `messages` (a conversation; the turns before the assistant's
first one are the prompt, so that all answers in the output are the model's own), or `text`.
"""

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from draftstore.errors import CorpusError, NoTextError, TokenizerError, counted, type_name
from draftstore.storage.report import ReadReport, RecordProblem
from draftstore.text.chat import Message, as_messages
from draftstore.text.conversation import Content, encode_conversation
from draftstore.text.records import read_objects, record_id
from draftstore.text.tokenizer import TextTokenizer

KEYS = ("prompt", "messages", "text")


class Prompt(NamedTuple):
    """One prompt.

    Attributes:
        id: the record's own, else its position `file#line`.
        content: a text to continue, or a conversation to answer.
        tokens: number of its ids.
    """

    id: str
    content: Content
    tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asking:
    """How prompts are read and formatted for a model.

    Attributes:
        chat: whether texts are user messages; None: if the model has a chat template.
        system: system message for conversations without one.
        max_prompt_tokens: longer prompts are skipped; None: no limit.
        limit: maximum number of prompts.
        strict: whether to stop at the first bad record.
    """

    chat: bool | None = None
    system: str | None = None
    max_prompt_tokens: int | None = None
    limit: int | None = None
    strict: bool = False


@dataclasses.dataclass
class PromptReport(ReadReport):
    """Counts of a reading of prompts; `documents` are the prompts.

    Attributes:
        repeated: duplicate prompts.
        too_long: prompts skipped for their length.
    """

    repeated: int = 0
    too_long: int = 0

    def absence(self) -> str:
        """Say why there is no prompt; empty if there was nothing to read."""
        too_long = f"{counted(self.too_long, 'prompt')} too long" if self.too_long else ""
        return "; ".join(reason for reason in (too_long, super().absence()) if reason)


def read_prompts(
    paths: Sequence[Path], tokenizer: TextTokenizer, asking: Asking
) -> tuple[list[Prompt], PromptReport]:
    """Return the distinct prompts of JSON Lines files (plain, .gz, .zst), in order."""
    chat = tokenizer.has_chat_template if asking.chat is None else asking.chat
    if asking.system is not None and not chat:
        raise TokenizerError(
            f"a system message needs a chat: {tokenizer.name!r} has no chat template, or --raw was given; "
            "leave the system message out"
        )
    asking = dataclasses.replace(asking, chat=chat)
    report = PromptReport()
    prompts: list[Prompt] = []
    for prompt in _read(paths, tokenizer, asking, report):
        prompts.append(prompt)
        if len(prompts) == asking.limit:
            break
    report.documents = len(prompts)
    if not prompts:
        names = ", ".join(str(path) for path in paths)
        raise NoTextError(f"no prompt in {names}" + f": {report.absence()}" * bool(report.absence()))
    return prompts, report


def _read(
    paths: Sequence[Path], tokenizer: TextTokenizer, asking: Asking, report: PromptReport
) -> Iterator[Prompt]:
    """Yield the prompts that can be answered, and count the others."""
    seen: set[bytes] = set()
    for path in paths:
        for place, record in read_objects(path):
            try:
                prompt, digest = _prompt(record, f"{path.name}#{place.rpartition(' ')[2]}", tokenizer, asking)
            except (CorpusError, TokenizerError) as error:
                if asking.strict:
                    raise CorpusError(f"{place}: {error}") from None
                report.add_problem(RecordProblem(place, str(error)))
                continue
            if prompt.tokens > (asking.max_prompt_tokens or prompt.tokens):
                report.too_long += 1
            elif digest in seen:
                report.repeated += 1
            else:
                seen.add(digest)
                yield prompt


def _prompt(
    record: Mapping[str, Any] | RecordProblem, place: str, tokenizer: TextTokenizer, asking: Asking
) -> tuple[Prompt, bytes]:
    """Return a record's prompt and the key that identifies duplicates."""
    if isinstance(record, RecordProblem):
        raise CorpusError(record.reason)
    content = _content(record, asking)
    ids = encode_conversation(tokenizer, content)
    if not len(ids):
        raise TokenizerError("the prompt is empty, and the model needs a token to begin with")
    digest = hashlib.blake2b(ids.tobytes(), digest_size=16).digest()
    return Prompt(record_id(record) or place, content, len(ids)), digest


def _content(record: Mapping[str, Any], asking: Asking) -> Content:
    """Return the content of a record."""
    key = next((key for key in KEYS if key in record), None)
    if key is None:
        raise CorpusError(f"has none of {', '.join(map(repr, KEYS))}")
    value = record[key]
    if isinstance(value, str) and value.strip():
        return _with_system([{"role": "user", "content": value}], asking) if asking.chat else value
    if not isinstance(value, list | str):
        raise CorpusError(f"{key!r} is {type_name(value)}, expected text or a list of messages")
    messages = as_messages(value, key) if isinstance(value, list) else []
    if key != "prompt":
        roles = [message["role"] for message in messages]
        messages = messages[: roles.index("assistant")] if "assistant" in roles else messages
    if not any(message["content"].strip() for message in messages):
        raise CorpusError(f"{key!r} holds no question")
    return _with_system(messages, asking)


def _with_system(messages: list[Message], asking: Asking) -> list[Message]:
    """Add the system message unless there is one."""
    if asking.system is None or messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": asking.system}, *messages]
