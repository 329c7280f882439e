"""Records of answers, decoded or copied from a response log, for builds and replays."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from draftstore.answers.journal import Item, Journal, StoredAnswer
from draftstore.answers.prompts import Asking, Prompt, PromptReport, read_prompts
from draftstore.errors import BuildError, CorpusError, TokenizerError
from draftstore.hf.loading import LoadedModel
from draftstore.storage.report import MAX_PROBLEMS, RecordProblem
from draftstore.text.chat import as_messages
from draftstore.text.conversation import Content, answer_lead, encode_conversation
from draftstore.text.incremental import Pieces
from draftstore.text.records import read_objects
from draftstore.text.tokenizer import TextTokenizer

OnProgress: TypeAlias = Callable[[int, int, int], None]
"""Called with the answers done, their total, and the tokens decoded so far in this run."""


@dataclasses.dataclass(frozen=True)
class ResponseOptions(Asking):
    """Prompts and settings of answers; `max_prompt_tokens` defaults to what fits into the model's positions.

    Attributes:
        prompts: JSON Lines files, see `draftstore.answers.prompts`.
        logs: response logs of the worker; this model's answers in them are copied.
        logged_as: the model's name in the logs; None: its own.
        max_new_tokens: maximum tokens of an answer.
        temperature: 0 takes the most likely token.
        top_p: probability mass of nucleus sampling.
        samples: answers per prompt.
        seed: seed of the sampling.
    """

    prompts: tuple[Path, ...] = ()
    logs: tuple[Path, ...] = ()
    logged_as: str | None = None
    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    samples: int = 1
    seed: int = 0

    def check(self) -> None:
        """Refuse invalid settings.

        Raises:
            BuildError: the message says what to change.
        """
        if not self.prompts and not self.logs:
            raise BuildError("no prompts and no response log: give prompts (--prompts) or a log (--log)")
        if self.samples > 1 and not self.temperature:
            raise BuildError(
                f"{self.samples} samples at temperature 0 are all the same: give a temperature, such as 0.7"
            )

    @property
    def decoding(self) -> dict[str, Any]:
        """Return the sampling settings in the form of records."""
        drawn = {"top_p": self.top_p, "seed": self.seed} if self.temperature else {}
        return {"temperature": self.temperature, "max_new_tokens": self.max_new_tokens, **drawn}


def read_questions(options: ResponseOptions, loaded: LoadedModel) -> tuple[list[Prompt], PromptReport]:
    """Return the prompts to answer."""
    room = None if loaded.positions is None else loaded.positions - options.max_new_tokens
    if room is not None and room < 1:
        raise BuildError(
            f"{options.max_new_tokens:,} new tokens leave no room for a prompt: {loaded.name!r} has "
            f"{loaded.positions:,} positions; ask for fewer new tokens"
        )
    limits = [limit for limit in (room, options.max_prompt_tokens) if limit is not None]
    asking = dataclasses.replace(options, max_prompt_tokens=min(limits, default=None))
    return read_prompts(options.prompts, loaded.text, asking)


def decode_answers(
    options: ResponseOptions,
    loaded: LoadedModel,
    prompts: list[Prompt],
    journal: Journal,
    batch: int,
    on_progress: OnProgress,
) -> None:
    """Decode all answers that a journal lacks.

    Prompts of similar length are batched, longest first, since those need most memory.
    """
    from draftstore.answers.batches import Batches, Choice, Row

    items = [(number, sample) for number in range(len(prompts)) for sample in range(options.samples)]
    items.sort(key=lambda item: (-prompts[item[0]].tokens, item))
    decoded = 0

    def grew(tokens: int) -> None:
        nonlocal decoded
        decoded += tokens
        on_progress(len(journal.answers), len(items), decoded)

    batches = Batches(loaded, Choice(options.max_new_tokens, options.temperature, options.top_p), batch, grew)
    grew(0)
    for begin in range(0, len(items), batch):
        # Batches are formed before finished ones are skipped: batch composition affects rounding.
        todo = [item for item in items[begin : begin + batch] if item not in journal.answers]
        contents = [prompts[number].content for number, _ in todo]
        ids = [encode_conversation(loaded.text, content) for content in contents]
        rows = [Row(prompt, (options.seed, *item)) for prompt, item in zip(ids, todo, strict=True)]
        done = 0
        for part in batches.decode(rows):
            some = slice(done, done + len(part))
            texts = map(partial(_answer_text, loaded.text), contents[some], ids[some], part)
            journal.add(
                [
                    StoredAnswer(*item, text, len(answer), ended=len(answer) < options.max_new_tokens)
                    for item, text, answer in zip(todo[some], texts, part, strict=True)
                ]
            )
            done += len(part)
            grew(0)


def _answer_text(
    tokenizer: TextTokenizer, content: Content, prompt: NDArray[np.int32], answer: list[int]
) -> str:
    """Return the text that ids add to a prompt, without the lead-in of an answer."""
    pieces = Pieces(tokenizer, prompt)
    text = "".join([pieces.push(token) for token in answer]) + pieces.finish()
    return text.removeprefix(answer_lead(tokenizer, content))


def decoded_records(
    options: ResponseOptions,
    loaded: LoadedModel,
    prompts: list[Prompt],
    answers: dict[Item, StoredAnswer],
    counts: "Counter[str]",
) -> Iterator[dict[str, Any]]:
    """Yield the records of decoded answers, in the order of the prompts."""
    specials = [loaded.text.decode([token]) for token in sorted(loaded.text.special_ids)]
    for (number, sample), answer in sorted(answers.items()):
        counts["tokens"] += answer.tokens
        if not answer.text.strip():
            counts["empty"] += 1
        elif any(special and special in answer.text for special in specials):
            counts["special"] += 1  # a tokenizer would read it as the token
        else:
            counts["decoded"] += 1
            counts["cut"] += not answer.ended
            prompt = prompts[number]
            name = prompt.id if options.samples == 1 else f"{prompt.id}#{sample}"
            yield {
                "id": name,
                "model": loaded.name,
                "decoding": options.decoding,
                **_with_output(prompt.content, answer.text),
            }


def _with_output(content: Content, output: str) -> dict[str, Any]:
    """Return prompt and output in the form that replays and builds read."""
    whole: dict[str, Any] = {"text": f"{content}{output}"}
    if not isinstance(content, str):
        whole = {"messages": [*content, {"role": "assistant", "content": output}]}
    return {"prompt": content, "output": output, **whole}


def logged_records(
    options: ResponseOptions, model: str, counts: "Counter[str]", problems: list[RecordProblem]
) -> Iterator[dict[str, Any]]:
    """Yield a model's records in response logs, with prompt and output separate if possible."""
    for path in options.logs:
        for place, record in read_objects(path):
            try:
                found = _log_record(record, model)
            except (CorpusError, TokenizerError) as error:
                if options.strict:
                    raise CorpusError(f"{place}: {error}") from None
                counts["bad_records"] += 1
                if len(problems) < MAX_PROBLEMS:
                    problems.append(RecordProblem(place, str(error)))
                continue
            if isinstance(found, str):
                counts[found] += 1
            else:
                counts["logged"] += 1
                yield found


def _log_record(record: dict[str, Any] | RecordProblem, model: str) -> dict[str, Any] | str:
    """Return a record to copy, or the name of the counter for skipping it."""
    if isinstance(record, RecordProblem):
        raise CorpusError(record.reason)
    if record.get("model") != model:
        return "other_models"
    if isinstance(record.get("text"), str):
        return record if record["text"].strip() else "empty"
    if not isinstance(record.get("messages"), list):
        raise CorpusError("has neither 'messages' nor 'text'")
    *prompt, answer = as_messages(record["messages"], "messages") or [{"role": "nobody"}]
    if answer["role"] != "assistant":
        raise CorpusError("'messages' does not end with an answer")
    return record | {"prompt": prompt, "output": answer["content"]} if answer["content"].strip() else "empty"
