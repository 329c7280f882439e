"""Replay: walk recorded model outputs and ask a drafter at every pass, as live decoding would.

For a recorded greedy output the accepted length is exactly what decoding live would give: the tokens are
forced. Counting, per output:

- prompt and output are tokenized together: BOS, the tokenizer's chat template (or without one
  `USER: ... ASSISTANT: ...`), the output starting at the first id that differs from the prompt alone, cut at
  1,024 tokens, without EOS;
- its first token comes from the prefill, so accepted length M = (tokens - 1) / verification passes;
- at each pass the drafter knows everything up to and including the last accepted token, and the pass yields
  the tokens along which the draft agrees with the output, and one more from the model itself.

Dense stores are asked with the hidden states of the model, which must have been recorded too, or computed again.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftstore.decoding.acceptance import Acceptance
from draftstore.decoding.loop import Fixed, Planner, Tally, decode
from draftstore.drafting.drafter import Drafter, Session, projection_of
from draftstore.errors import CorpusError, ReplayError, TokenizerError
from draftstore.text.chat import as_messages
from draftstore.text.conversation import encode_conversation
from draftstore.text.records import read_json_records
from draftstore.text.tokenizer import TextTokenizer
from draftstore.trees.tree import DraftTree

MAX_OUTPUT_TOKENS = 1024


@dataclasses.dataclass(frozen=True)
class Recording:
    """One recorded output.

    Attributes:
        id: of the record.
        prompt: int32 [any], what the model saw.
        output: int32 [n], what it said.
        hidden: float32 [n, hidden_size], the last hidden states (after the final norm): row j predicted output[j]; NaN
            where one is not known. None if none is.
    """

    id: str
    prompt: NDArray[np.int32]
    output: NDArray[np.int32]
    hidden: NDArray[np.float32] | None = None


@dataclasses.dataclass
class ReplayResult:
    """Totals of a replay.

    Attributes:
        rows: outputs replayed.
        tokens: tokens that verification passes yielded (the first of each output is the prefill's).
        passes: verification passes.
        nodes: draft nodes over all passes.
        accepted: of them, those that were accepted.
        misses: passes without a draft.
        rates: share of the draft nodes that were accepted, of each output for which any was drafted.
        lookup_ns: duration of every lookup.
    """

    rows: int = 0
    tokens: int = 0
    passes: int = 0
    nodes: int = 0
    accepted: int = 0
    misses: int = 0
    rates: list[float] = dataclasses.field(default_factory=list)
    lookup_ns: list[int] = dataclasses.field(default_factory=list)

    @property
    def accepted_length(self) -> float:
        """Tokens a pass; plain decoding is 1.0."""
        return self.tokens / self.passes if self.passes else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted by drafted nodes of an output, the mean over outputs."""
        return sum(self.rates) / len(self.rates) if self.rates else 0.0

    def add(self, tally: Tally) -> None:
        """Count an output."""
        self.rows += 1
        self.tokens += tally.tokens
        self.passes += tally.passes
        self.nodes += tally.drafted
        self.accepted += tally.accepted
        if tally.drafted:
            self.rates.append(tally.acceptance_rate)

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
            "nodes_mean": round(self.nodes / passes, 2),
            "miss_rate": round(self.misses / passes, 4),
            "lookup_us": {"p50": round(p50, 1), "p99": round(p99, 1), "mean": round(float(times.mean()), 1)},
        }


def read_recordings(
    path: Path, tokenizer: TextTokenizer, *, model: str | None = None, limit: int | None = None
) -> Iterator[Recording]:
    """Stream the recordings of a JSON Lines file (plain, .gz, .zst) as token ids.

    A record holds `prompt` (text as the model saw it, or a list of messages) and `output`; `id` and `model`
    are optional.

    Args:
        path: the file.
        tokenizer: the tokenizer of the store that will be asked.
        model: only the outputs of this model.
        limit: most outputs.

    Raises:
        ReplayError: no such file, a record that cannot be used, or none left.
    """
    count, models = 0, set()
    for place, record in _records(path):
        models.add(record.get("model"))
        if model is not None and record.get("model") != model:
            continue
        count += 1
        try:
            yield _recording(record, place, tokenizer)
        except TokenizerError as error:
            raise ReplayError(f"{place}: {error}") from None
        if count == limit:
            return
    if count == 0:
        wanted = f" of model {model!r}" if model else ""
        known = ", ".join(sorted(name for name in models if isinstance(name, str))) or "not named"
        raise ReplayError(f"{path} holds no recording{wanted}" + f", its models are {known}" * bool(models))


def _records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Stream the objects of a JSON Lines file with their places.

    Raises:
        ReplayError: it is none.
    """
    try:
        yield from read_json_records(path)
    except CorpusError as error:
        raise ReplayError(str(error)) from None


def _recording(record: Mapping[str, Any], place: str, tokenizer: TextTokenizer) -> Recording:
    """Tokenize one record.

    Raises:
        ReplayError: prompt or output is missing or of another type.
        TokenizerError: no valid Unicode, a broken message, or a conversation that the chat template refuses.
    """
    prompt, output = record.get("prompt"), record.get("output")
    if not isinstance(output, str):
        raise ReplayError(f"{place}: expected the key 'output' with a text")
    if isinstance(prompt, list):
        prompt = as_messages(prompt, "prompt")
    elif not isinstance(prompt, str):
        raise ReplayError(f"{place}: expected the key 'prompt' with a text or a list of messages")
    alone, together = encode_conversation(tokenizer, prompt), encode_conversation(tokenizer, prompt, output)
    shared = min(len(alone), len(together))
    differs = np.flatnonzero(alone[:shared] != together[:shared])
    cut = int(differs[0]) if len(differs) else shared
    return Recording(str(record.get("id", place)), together[:cut], together[cut : cut + MAX_OUTPUT_TOKENS])


def replay(
    drafter: Drafter,
    recordings: Iterable[Recording],
    *,
    budget: int = 64,
    min_prob: float = 0.0,
    on_progress: Callable[[ReplayResult], None] = lambda _: None,
) -> ReplayResult:
    """Replay recordings with a drafter.

    Args:
        drafter: is asked once a pass.
        recordings: what the model said.
        budget: most nodes of a draft.
        min_prob: least probability of a node.
        on_progress: called after every output.

    Raises:
        ReplayError: the drafter needs hidden states, and a recording has none.
    """
    result = ReplayResult()
    planner = Fixed(budget)
    for recording in recordings:
        result.add(_replay_one(drafter, recording, planner, min_prob, result))
        on_progress(result)
    return result


def _replay_one(
    drafter: Drafter, recording: Recording, planner: Planner, min_prob: float, result: ReplayResult
) -> Tally:
    """Walk one output; return its figures, and add lookups to the totals.

    Raises:
        ReplayError: the drafter needs hidden states that were not recorded.
    """
    tally = Tally()
    if len(recording.output) < 2:
        return tally
    states = recording.hidden
    session = drafter.session(
        np.concatenate([recording.prompt, recording.output[:1]]),
        hidden=None if states is None else _as_wanted(states[0], drafter),
    )
    if states is None and session.needs_hidden:
        raise ReplayError(
            f"recording {recording.id} has no hidden states, and the drafter needs them: compute them with "
            "the model that made it"
        )
    target = RecordedTarget(recording.output, None if states is None else _as_wanted(states, session))
    for step in decode(target, session, planner=planner, ends=target.ends, min_prob=min_prob):
        tally.add(step)
        result.lookup_ns.append(step.draft_ns)
        result.misses += len(step.tree) == 0
    return tally


def _as_wanted(states: NDArray[np.float32], asker: Drafter | Session) -> NDArray[np.float32]:
    """Return hidden states, float32 [..., hidden_size], as a drafter or a session wants them."""
    projection = projection_of(asker)
    return states if projection is None else projection.apply(states)


class RecordedTarget:
    """A `Target`, and each of its verdicts, that says what was recorded."""

    def __init__(self, output: NDArray[np.int32], hidden: NDArray[np.float32] | None = None) -> None:
        """Say an output, of which the prefill has already said the first token.

        Args:
            output: int32 [n].
            hidden: float32 [n, d], the states that predicted it, projected if the session has a projection.
        """
        self._output = output.tolist()
        self._hidden = hidden
        self._position = self._begin = 1
        self._tree = DraftTree.empty()

    def verify(self, tree: DraftTree) -> "RecordedTarget":
        """Return the verdict: the output is what it is."""
        self._tree, self._begin = tree, self._position
        return self

    def choose(self, row: int, emitted: Sequence[int]) -> int:  # noqa: ARG002
        """Return the next recorded token."""
        return int(self._output[self._position + len(emitted)])

    def ends(self, emitted: Sequence[int]) -> bool:
        """Tell whether that was the last recorded token."""
        return self._position + len(emitted) == len(self._output)

    def candidates(self) -> None:
        """Return None: they were not recorded."""

    def hidden(self, row: int) -> NDArray[np.float32] | None:
        """Return float32 [d], the state at a row that was accepted; None if none was recorded."""
        if self._hidden is None:
            return None
        depth = len(self._tree.path(row - 1)) if row else 0
        state: NDArray[np.float32] = self._hidden[self._begin + depth]
        return state

    def keep(self, accepted: Acceptance) -> None:
        """Go on behind what was accepted."""
        self._position += len(accepted.tokens)
