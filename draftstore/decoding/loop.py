"""The decode loop: propose, run a forward pass, accept, repeat. It is the same for every model, drafter and batch.

    results = step(texts, model)                    one pass over any number of texts
    for done in decode(model, text): ...            a single text to its end

The model is a `Model`: it runs the forward pass and keeps its cache. The output is exact whatever the drafters propose:
see `draftstore.decoding.acceptance`. An error in one text (its drafter, choice of tokens, or stopping criteria) ends
only that text.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter_ns
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from draftstore.decoding.acceptance import Acceptance, accept
from draftstore.decoding.budget import Planner, trim_together
from draftstore.drafting.outcomes import SourceOutcome
from draftstore.drafting.slots import SlotSession
from draftstore.trees.tree import DraftTree


class Verdict(Protocol):
    """The model's outputs for one text's tree of n nodes, after one forward pass over its n + 1 rows."""

    def choose(self, row: int, emitted: Sequence[int]) -> int:
        """Return the token that the model emits at a row; see `draftstore.decoding.acceptance.Choose`."""

    def candidates(self) -> NDArray[np.int32] | None:
        """Return int32 [n + 1, 8], the most likely tokens at each row, best first; None if unknown."""

    def hidden(self, row: int) -> NDArray[np.floating[Any]] | None:
        """Return float [hidden_size], the last hidden state (after the final norm) at a row; None if unknown."""


class Text:
    """A text being decoded: its drafts, its stopping criterion, and its part of the current step.

    Attributes:
        session: its drafts; those of texts in one step are in the same slots.
        min_prob: minimum probability of a drafted node.
        over: whether it has ended.
        proposed: the draft of this step, of which `tree` is verified.
        accepted: what the model emitted, once that is known.
        error: what ended the text early.
    """

    session: SlotSession
    planner: Planner
    min_prob: float
    over = False

    def __init__(
        self, session: SlotSession, planner: Planner, ends: Callable[[Sequence[int]], bool], min_prob: float = 0.0
    ) -> None:  # fmt: skip
        """Begin after the first token; `ends` is called once for each token emitted, in order, and may keep state."""
        self._ends = ends
        self.session, self.planner, self.min_prob = session, planner, min_prob
        planner.begin()

    def budget(self) -> int:
        """Return the maximum nodes of a draft now."""
        return self.planner.budget()

    def cut(self, tree: DraftTree) -> DraftTree:
        """Return a draft without nodes that cannot be verified now."""
        return tree

    def ends(self, emitted: Sequence[int]) -> bool:
        """Return True if the text ends with the last token emitted in this step."""
        self.over = self._ends(emitted)
        return self.over

    def begin_step(self) -> None:
        """Forget the step before."""
        self.proposed = self.tree = DraftTree.empty()
        self.accepted: Acceptance | None = None
        self.error: Exception | None = None

    def accept(self, verdict: Verdict) -> Acceptance | None:
        """Return what the model emits; None if the text has failed."""
        if self.error is None:
            try:
                self.accepted = accept(self.tree, verdict.choose, self.ends)
            except Exception as error:  # noqa: BLE001 (of this text alone)
                self.error = error
        return self.accepted

    def result(self, draft_ns: int, forward_ns: int, accept_ns: int) -> "Step | Exception":
        """Return the text's result of the step."""
        if self.error is not None or self.accepted is None:
            return self.error or RuntimeError("the text was not decoded")
        sources = self.session.slots.outcomes(self.session.slot)
        return Step(self.tree, *self.accepted, draft_ns, forward_ns, accept_ns, sources=sources)


class Model(Protocol):
    """A model with texts; its cache holds all tokens of each text but the last."""

    def verify(self, trees: Sequence[DraftTree]) -> Sequence[Verdict]:
        """Run one forward pass over each text's last token and its draft tree."""

    def keep(self, accepted: Sequence[Acceptance | None]) -> None:
        """Append accepted tokens to each text; afterwards the cache holds all but the last, the bonus token.

        None undoes the pass for a text that has failed.
        """


class Step(NamedTuple):
    """One forward pass and its result for one text.

    Attributes:
        tree: the draft that was verified.
        path: its accepted nodes.
        tokens: int32 [len(path) + 1], the new tokens of the text.
        draft_ns: nanoseconds to propose and trim; with several texts, an equal share of each total time.
        forward_ns: nanoseconds to verify; on an asynchronous device, only to queue the pass; then `accept_ns` waits.
        accept_ns: nanoseconds to walk the tree and update the cache.
        text: number of the text if several are decoded together.
        sources: outcome of each source; empty if no draft was requested.
    """

    tree: DraftTree
    path: list[int]
    tokens: NDArray[np.int32]
    draft_ns: int
    forward_ns: int
    accept_ns: int
    text: int = 0
    sources: Sequence[SourceOutcome] = ()


@dataclasses.dataclass
class Tally:
    """Totals of steps: forward passes, their tokens, verified and accepted nodes, and times as in `Step`."""

    passes: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    draft_ns: int = 0
    forward_ns: int = 0
    accept_ns: int = 0

    def count(self, tokens: int, drafted: int, accepted: int) -> None:
        """Add a pass that yielded some tokens, with its verified and accepted nodes."""
        self.passes += 1
        self.tokens += tokens
        self.drafted += drafted
        self.accepted += accepted

    def add(self, step: Step) -> None:
        """Add a step."""
        self.count(len(step.tokens), len(step.tree), len(step.path))
        self.draft_ns += step.draft_ns
        self.forward_ns += step.forward_ns
        self.accept_ns += step.accept_ns

    @property
    def accepted_length(self) -> float:
        """Tokens per pass; 1.0 for plain decoding."""
        return self.tokens / self.passes if self.passes else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted nodes divided by verified ones; 0 if there are none."""
        return self.accepted / self.drafted if self.drafted else 0.0


def step(texts: Sequence[Text], model: Model) -> list[Step | Exception]:
    """Run one pass over texts; return the result or the error of each."""
    begin = perf_counter_ns()
    for text in texts:
        text.begin_step()
    _draft(texts)
    drafted = perf_counter_ns()
    verdicts = model.verify([text.tree for text in texts])
    verified = perf_counter_ns()
    model.keep([text.accept(verdict) for text, verdict in zip(texts, verdicts, strict=True)])
    _learn([pair for pair in zip(texts, verdicts, strict=True) if pair[0].accepted])
    times = (drafted - begin, verified - drafted, perf_counter_ns() - verified)
    return [text.result(*(each // len(texts) for each in times)) for text in texts]


def decode(model: Model, text: Text) -> Iterator[Step]:
    """Decode one text to its end."""
    while not text.over:
        (done,) = step([text], model)
        if isinstance(done, Exception):
            raise done
        yield done


def _draft(texts: Sequence[Text]) -> None:
    """Draft for all texts together; if that fails, one by one, to find the one that fails."""
    try:
        budgets, least = [text.budget() for text in texts], [text.min_prob for text in texts]
        slots = texts[0].session.slots
        proposed = slots.propose([text.session.slot for text in texts], budgets, least).trees()
        cut = [text.cut(tree) for text, tree in zip(texts, proposed, strict=True)]
        trees = trim_together([text.planner for text in texts], cut)
    except Exception as error:  # noqa: BLE001 (of one text: the others continue)
        if len(texts) == 1:
            texts[0].error = error
        else:
            for text in texts:
                _draft([text])
        return
    for text, offered, tree in zip(texts, proposed, trees, strict=True):
        text.proposed, text.tree = offered, tree


def _learn(done: Sequence[tuple[Text, Verdict]]) -> None:
    """Pass the results to the drafters, with the optional data that they need, and to the planners."""
    accepted = [text.accepted for text, _ in done if text.accepted]
    if not done:
        return
    sessions = [text.session for text, _ in done]
    errors = sessions[0].slots.observe(
        [session.slot for session in sessions],
        np.concatenate([each.tokens for each in accepted]),
        np.cumsum([len(each.tokens) for each in accepted]),
        trees=[text.tree for text, _ in done],
        candidates=[verdict.candidates() if text.session.needs_candidates else None for text, verdict in done],
        hidden=_states([
            verdict.hidden(each.path[-1] + 1 if each.path else 0) if session.needs_hidden else None
            for (_, verdict), session, each in zip(done, sessions, accepted, strict=True)
        ]),
    )  # fmt: skip
    for place, ((text, _), each) in enumerate(zip(done, accepted, strict=True)):
        text.error = errors.get(place)
        try:
            if text.error is None:
                text.planner.learn(text.proposed, text.tree, each)
        except Exception as error:  # noqa: BLE001 (of this text alone)
            text.error = error


def _states(known: Sequence[NDArray[np.floating[Any]] | None]) -> NDArray[np.floating[Any]] | None:
    """Return the states that predicted the last tokens, NaN where unknown; None if none is known."""
    some = next((state for state in known if state is not None), None)
    if some is None:
        return None
    return np.array([np.full_like(some, np.nan) if each is None else each for each in known])
