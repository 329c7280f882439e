"""Replay: drafts at every pass over recorded model outputs, as in live decoding.

For a recorded greedy output, the accepted length is exactly that of live decoding, since the tokens are fixed. For each
output:

- prompt and output are tokenized together: BOS, the tokenizer's chat template (or without one
  `USER: ... ASSISTANT: ...`), the output starting at the first id that differs from the prompt alone, cut at
  1,024 tokens, without EOS;
- its first token comes from the prefill, so the accepted length M = (tokens - 1) / verification passes;
- at each pass the drafter knows everything up to and including the last accepted token, and the pass yields
  the tokens along which the draft agrees with the output, plus one from the model itself.

Dense stores need the hidden states of the model, recorded with the output or recomputed.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftstore.decoding.acceptance import Acceptance
from draftstore.decoding.budget import Fixed, Planner
from draftstore.decoding.conversation import Content, encode_conversation
from draftstore.decoding.loop import RowByRow, Step, Tally, Text, decode
from draftstore.drafting.drafter import Drafter
from draftstore.drafting.slots import start
from draftstore.errors import CorpusError, ReplayError, TokenizerError, type_name
from draftstore.storage.report import OnProgress, ignore
from draftstore.text.chat import Message, as_messages
from draftstore.text.records import CONVERSATIONS, read_json_records
from draftstore.text.tokenizer import TextTokenizer
from draftstore.trees.batch import DraftBatch
from draftstore.trees.frontier import BUDGET, MAX_BUDGET
from draftstore.trees.tree import DraftTree

MAX_OUTPUT_TOKENS = 1024


@dataclasses.dataclass(frozen=True)
class Recording:
    """One recorded output: int32 ids of the input and the output of the model.

    Attributes:
        hidden: float32 [n, hidden_size], last hidden states (after the final norm): row j predicted output[j]; NaN for
            unknown rows; None if all are unknown.
    """

    id: str
    prompt: NDArray[np.int32]
    output: NDArray[np.int32]
    hidden: NDArray[np.float32] | None = None


@dataclasses.dataclass
class ReplayResult(Tally):
    """Totals of a replay, without the first token of each output, which comes from the prefill.

    `rows` are outputs, `misses` passes without a draft, `rates` the share of accepted nodes of each output with any.
    """

    rows: int = 0
    misses: int = 0
    rates: list[float] = dataclasses.field(default_factory=list)
    lookup_ns: list[int] = dataclasses.field(default_factory=list)

    @property
    def acceptance_rate(self) -> float:
        """Share of drafted nodes that were accepted, per output, averaged over outputs."""
        return sum(self.rates) / len(self.rates) if self.rates else 0.0

    def add(self, step: Step) -> None:
        """Add a step."""
        super().add(step)
        self.misses += not len(step.tree)
        self.lookup_ns.append(step.draft_ns)

    def summary(self) -> dict[str, Any]:
        """Return the figures as JSON values; times in microseconds."""
        times = np.array(self.lookup_ns or [0]) / 1000
        p50, p99 = np.percentile(times, [50, 99])
        passes = max(self.passes, 1)
        return {
            "accepted_length": round(self.accepted_length, 4),
            "acceptance_rate": round(self.acceptance_rate, 4),
            "tokens": self.tokens,
            "passes": self.passes,
            "rows": self.rows,
            "nodes_mean": round(self.drafted / passes, 2),
            "miss_rate": round(self.misses / passes, 4),
            "lookup_us": {"p50": round(p50, 1), "p99": round(p99, 1), "mean": round(float(times.mean()), 1)},
        }


class Turn(NamedTuple):
    """One recorded output: its id, the text or conversation before it, its text, and both together."""

    id: str
    prompt: Content
    output: str
    whole: Content


def read_recordings(
    path: Path, tokenizer: TextTokenizer, *, model: str | None = None, limit: int | None = None
) -> Iterator[Recording]:
    """Stream the recordings of a file as token ids: JSON Lines, plain or compressed, or Parquet.

    A record has `prompt` (text as the model saw it, or a list of messages) and `output`, or a conversation, of which
    each answer is a recording (`turns_of`); `id` and `model` are optional. `model` selects those of one model.
    ReplayError if there is no such file, an invalid record, or none.
    """
    for place, turn in _chosen(path, model, limit):
        try:
            yield record_turn(turn, tokenizer)
        except TokenizerError as error:
            raise ReplayError(f"{place}: {error}") from None


def check_recordings(path: Path, *, model: str | None = None, limit: int | None = None) -> int:
    """Return the number of recordings that `read_recordings` would yield, without a tokenizer, or raise as it does."""
    return sum(1 for _ in _chosen(path, model, limit))


def _chosen(path: Path, model: str | None, limit: int | None) -> Iterator[tuple[str, Turn]]:
    """Stream the outputs of a model with their positions; see `read_recordings`."""
    count, models = 0, set()
    try:
        for place, record in read_json_records(path):
            models.add(record.get("model"))
            if model is not None and record.get("model") != model:
                continue
            for turn in turns_of(record, place):
                count += 1
                yield place, turn
                if count == limit:
                    return
    except CorpusError as error:
        raise ReplayError(str(error)) from None
    if count == 0:
        wanted = f" of model {model!r}" if model else ""
        known = ", ".join(sorted(name for name in models if isinstance(name, str))) or "not named"
        raise ReplayError(f"{path} holds no recording{wanted}" + f", its models are {known}" * bool(models))


def turns_of(record: Mapping[str, Any], place: str) -> list[Turn]:
    """Return the outputs of a record: one after a prompt, or all answers of a conversation that follow a turn.

    Answers without text, as some beside tool calls, are omitted. `place` is their id if the record has none, and names
    the record in errors. ReplayError if it has neither an output nor a conversation.
    """
    name = str(record.get("id", place))
    key = next((key for key in CONVERSATIONS if key in record), None)
    try:
        if "output" in record or key is None:
            prompt, output = _texts(record, place)
            if isinstance(prompt, str):
                return [Turn(name, prompt, output, prompt + output)]
            return [Turn(name, prompt, output, [*prompt, {"role": "assistant", "content": output}])]
        if not isinstance(record[key], list):
            raise ReplayError(f"{place}: {key!r} is {type_name(record[key])}, expected a list of messages")
        messages = as_messages(record[key], key)
    except TokenizerError as error:
        raise ReplayError(f"{place}: {error}") from None
    return [
        Turn(f"{name}#{number}", messages[:number], message["content"], messages[: number + 1])
        for number, message in enumerate(messages)
        if number and message["role"] == "assistant" and message["content"].strip()
    ]


def record_turn(turn: Turn, tokenizer: TextTokenizer) -> Recording:
    """Return an output as token ids; TokenizerError if the chat template rejects it, or for invalid Unicode."""
    alone = encode_conversation(tokenizer, turn.prompt)
    together = encode_conversation(tokenizer, turn.prompt, turn.output)
    shared = min(len(alone), len(together))
    differs = np.flatnonzero(alone[:shared] != together[:shared])
    cut = int(differs[0]) if len(differs) else shared
    return Recording(turn.id, together[:cut], together[cut : cut + MAX_OUTPUT_TOKENS])


def _texts(record: Mapping[str, Any], place: str) -> tuple[str | list[Message], str]:
    prompt, output = record.get("prompt"), record.get("output")
    if not isinstance(output, str):
        raise ReplayError(f"{place}: expected the key 'output' with a text, or a conversation")
    if isinstance(prompt, list):
        return as_messages(prompt, "prompt"), output
    if not isinstance(prompt, str):
        raise ReplayError(f"{place}: expected the key 'prompt' with a text or a list of messages")
    return prompt, output


def replay(
    drafter: Drafter,
    recordings: Iterable[Recording],
    *,
    budget: int = BUDGET,
    min_prob: float = 0.0,
    chain: int | None = None,
    learn: Callable[[Recording], None] = lambda _: None,
    on_progress: OnProgress = ignore,
) -> ReplayResult:
    """Replay recordings with a drafter; ReplayError if it needs hidden states and a recording has none.

    With `chain`, a single path of each draft is verified, of at most that many nodes. `learn` is called with every
    output after its replay, for drafters that learn from earlier outputs.
    """
    result = ReplayResult()
    planner = Fixed(budget, chain)
    total = len(recordings) if isinstance(recordings, Sized) else None
    for recording in recordings:
        drafted, accepted = result.drafted, result.accepted
        _replay_one(drafter, recording, planner, min_prob, result)
        result.rows += 1
        if drafted := result.drafted - drafted:
            result.rates.append((result.accepted - accepted) / drafted)
        learn(recording)
        on_progress(result.rows, total, f"accepted length {result.accepted_length:.3f}")
    return result


def _replay_one(
    drafter: Drafter, recording: Recording, planner: Planner, min_prob: float, result: ReplayResult
) -> None:
    if len(recording.output) < 2:
        return
    states = recording.hidden
    session = start(
        drafter,
        np.concatenate([recording.prompt, recording.output[:1]]),
        hidden=None if states is None else states[0],
    )
    if states is None and session.needs_hidden:
        raise ReplayError(
            f"recording {recording.id} has no hidden states, which the drafter needs: compute them with "
            "the model that made it"
        )
    model = RecordedModel(recording.output, states)
    for step in decode(model, Text(session, planner, model.ends, min_prob)):
        result.add(step)


class RecordedModel:
    """A `Model` that emits a recorded output, int32 [n]; it also serves as its own verdict.

    `hidden`, float32 [n, hidden_size], are the states that predicted it.
    """

    def __init__(self, output: NDArray[np.int32], hidden: NDArray[np.float32] | None = None) -> None:
        self._output = output.tolist()
        self._hidden = hidden
        self._position = self._begin = 1
        self._tree = DraftTree.empty()

    def room(self) -> int:
        """Return that drafts may have any size."""
        return MAX_BUDGET

    def verify(self, drafts: DraftBatch) -> RowByRow:
        """Return this object as the verdict of the only text."""
        (self._tree,), self._begin = drafts.trees(), self._position
        return RowByRow([self])

    def choose(self, row: int, emitted: Sequence[int]) -> int:  # noqa: ARG002
        """Return the next recorded token."""
        return int(self._output[self._position + len(emitted)])

    def ends(self, emitted: Sequence[int]) -> bool:
        """Return True if the last recorded token was emitted."""
        return self._position + len(emitted) == len(self._output)

    def candidates(self) -> None:
        """Return None: they were not recorded."""

    def hidden(self, row: int) -> NDArray[np.float32] | None:
        """Return float32 [hidden_size], the state at an accepted row; None if it was not recorded."""
        if self._hidden is None:
            return None
        depth = len(self._tree.path(row - 1)) if row else 0
        state: NDArray[np.float32] = self._hidden[self._begin + depth]
        return state

    def keep(self, accepted: Sequence[Acceptance | None]) -> None:
        """Advance past the accepted tokens."""
        self._position += sum(len(each.tokens) for each in accepted if each)
