"""The decode loop: propose, run a forward pass, accept, repeat. It is the same for every model, drafter and batch.

    results = step(texts, model)                    one pass over any number of texts
    for done in decode(model, text): ...            a single text to its end

The model is a `Model`: it runs the forward pass and keeps its cache. The output is exact whatever the drafters propose:
see `draftstore.decoding.acceptance`. An error in one text (its drafter, choice of tokens, or stopping criteria) ends
only that text.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from time import perf_counter_ns
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from draftstore.decoding.acceptance import Acceptance, Walks, accept
from draftstore.decoding.budget import CostPlanner, Fixed, Planner, learn_together, trim_together
from draftstore.decoding.limits import within_limits
from draftstore.drafting.outcomes import SourceOutcome
from draftstore.drafting.slots import Outcomes, SlotSession
from draftstore.drafting.sources import IDS
from draftstore.trees.batch import DraftBatch, LazyTrees
from draftstore.trees.tree import DraftTree

NO_LIMIT = 1 << 30


class Text:
    """A text being decoded: its drafts, and what ends it.

    Attributes:
        session: its drafts; those of texts in one step are in the same slots.
        min_prob: minimum probability of a drafted node.
        vocab_size: limit of the ids that the model knows.
        over: whether it has ended.
        error: what ended it early.
    """

    session: SlotSession
    planner: Planner
    min_prob: float
    vocab_size = IDS
    over = False
    error: Exception | None = None

    def __init__(
        self, session: SlotSession, planner: Planner, ends: Callable[[Sequence[int]], bool], min_prob: float = 0.0
    ) -> None:  # fmt: skip
        """Begin after the first token; `ends` is called once for each token emitted, in order, and may keep state."""
        self._ends = ends
        self.session, self.planner, self.min_prob = session, planner, min_prob
        planner.begin()

    def depth(self) -> int:
        """Return the maximum depth of a draft now."""
        return NO_LIMIT

    def ends(self, emitted: Sequence[int]) -> bool:
        """Return True if the text ends with the last token emitted in this step."""
        self.over = self._ends(emitted)
        return self.over

    def ends_after(self, emitted: Sequence[int]) -> int:
        """Return how many tokens, emitted if the text went on, belong to it, and note whether it is over."""
        for count in range(1, len(emitted) + 1):
            if self.ends(emitted[:count]):
                return count
        return len(emitted)

    def show(self, tokens: Sequence[int]) -> None:
        """Stream the tokens of a step."""


class Outputs(Protocol):
    """What the model says of the drafts of a batch, after one forward pass: of each text, n + 1 rows."""

    def walks(self) -> Walks:
        """Return what the model emits, for texts of which that does not depend on when they end."""

    def choose(self, text: int, row: int, emitted: Sequence[int]) -> int:
        """Return the token that a text emits at a row; see `draftstore.decoding.acceptance.Choose`."""

    def settle(self, taken: Mapping[int, int]) -> None:
        """Note how many tokens of their walks texts have taken, by text; each is noted once."""

    def candidates(self, text: int) -> NDArray[np.int32] | None:
        """Return int32 [n + 1, 8], the most likely tokens at each row of a text, best first; None if unknown."""

    def hidden(self, texts: Sequence[int], rows: Sequence[int]) -> NDArray[np.floating[Any]] | None:
        """Return float [texts, hidden_size], the last hidden states (after the final norm) at a row of each text.

        NaN where unknown; None if all are unknown.
        """


class Verdict(Protocol):
    """What the model says of one text's draft of n nodes, row by row; see `Outputs`."""

    def choose(self, row: int, emitted: Sequence[int]) -> int:
        """Return the token that the model emits at a row."""

    def candidates(self) -> NDArray[np.int32] | None:
        """Return int32 [n + 1, 8], the most likely tokens at each row; None if unknown."""

    def hidden(self, row: int) -> NDArray[np.floating[Any]] | None:
        """Return float [hidden_size], the last hidden state at a row; None if unknown."""


class RowByRow:
    """The `Outputs` for texts that are judged one by one."""

    def __init__(self, verdicts: Sequence[Verdict]) -> None:
        self._verdicts = verdicts

    def walks(self) -> Walks:
        """Return no walks."""
        return Walks.unknown(len(self._verdicts))

    def choose(self, text: int, row: int, emitted: Sequence[int]) -> int:
        """Return the token that a text emits at a row."""
        return self._verdicts[text].choose(row, emitted)

    def settle(self, taken: Mapping[int, int]) -> None:
        """Do nothing: rows are chosen when they are reached."""

    def candidates(self, text: int) -> NDArray[np.int32] | None:
        """Return the candidates of a text."""
        return self._verdicts[text].candidates()

    def hidden(self, texts: Sequence[int], rows: Sequence[int]) -> NDArray[np.floating[Any]] | None:
        """Return the states of texts, NaN where unknown."""
        known = [self._verdicts[text].hidden(row) for text, row in zip(texts, rows, strict=True)]
        some = next((state for state in known if state is not None), None)
        if some is None:
            return None
        return np.array([np.full_like(some, np.nan) if each is None else each for each in known])


class Model(Protocol):
    """A model with texts; its cache holds all tokens of each text but the last."""

    def room(self) -> int:
        """Return the maximum nodes of a draft now."""

    def verify(self, drafts: DraftBatch) -> Outputs:
        """Run one forward pass over each text's last token and its draft."""

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


class QueuedPass:
    """A forward pass over texts, from their drafts to the results.

        queued = QueuedPass(texts, model)     drafts, and queues the pass
        queued.finish()                       waits for it, and appends what was accepted
        queued.results()                      may wait until the next pass is queued

    A text that fails, or is discarded before `finish`, is left as it was before the pass; of the random numbers of a
    text that chooses row by row, those that it had drawn are gone.
    """

    def __init__(self, texts: Sequence[Text], model: Model) -> None:
        begin = perf_counter_ns()
        self.texts, self._model = [*texts], model
        for text in texts:
            text.error = None
        self._proposed, self._drafts = _draft(self.texts, model.room())
        drafted = perf_counter_ns()
        self._outputs = model.verify(self._drafts)
        self._ns = [drafted - begin, perf_counter_ns() - drafted, 0]
        self._accepted: list[Acceptance | None] = []
        self._errors: list[Exception | None] = []
        self._settled = set[int]()
        self._outcomes: Outcomes | None = None

    def finish(self) -> None:
        """Wait for the pass, append what was accepted, and let drafters and planners learn."""
        begin = perf_counter_ns()
        self._accepted = self._accept()
        self._model.keep(self._accepted)
        places = [place for place, each in enumerate(self._accepted) if each is not None]
        if places:
            self._learn(places)
        self._errors = [text.error for text in self.texts]
        self._ns[2] = perf_counter_ns() - begin

    def discard(self, error: Exception, texts: Sequence[Text] | None = None) -> None:
        """Leave some texts, or all, as they were before the pass, and end them with an error."""
        for place, text in enumerate(self.texts):
            if place not in self._settled and (texts is None or text in texts):
                text.error = error
                self._settle({place: 0})

    def results(self) -> list[Step | Exception]:
        """Return the result or the error of each text, after its tokens were streamed."""
        times = [each // len(self.texts) for each in self._ns]
        return [
            self._result(place, text, tree, times)
            for place, (text, tree) in enumerate(zip(self.texts, self._trees, strict=True))
        ]

    def _result(self, place: int, text: Text, tree: DraftTree, times: list[int]) -> Step | Exception:
        accepted, error = self._accepted[place], self._errors[place]
        if error is not None or accepted is None or self._outcomes is None:
            return error or RuntimeError("the text was not decoded")
        try:
            text.show(accepted.tokens.tolist())
        except Exception as failed:  # noqa: BLE001 (of this text alone)
            text.error = failed
            return failed
        draft_ns, forward_ns, accept_ns = times
        sources = self._outcomes.of(place)
        return Step(tree, *accepted, draft_ns, forward_ns, accept_ns, sources=sources)

    @cached_property
    def _trees(self) -> list[DraftTree]:
        return self._drafts.trees()

    def _accept(self) -> list[Acceptance | None]:
        walks, accepted = self._outputs.walks(), list[Acceptance | None]()
        rows = zip(walks.tokens.tolist(), walks.nodes.tolist(), walks.sizes.tolist(), strict=True)
        for place, (emitted, nodes, size) in enumerate(rows):
            text, found = self.texts[place], None
            try:
                if text.error is None:
                    found = self._walk(place, text, walks, emitted[:size], nodes)
            except Exception as error:  # noqa: BLE001 (of this text alone)
                text.error = error
            accepted.append(found)
        taken = [0 if each is None else len(each.tokens) for each in accepted]
        self._settle({place: count for place, count in enumerate(taken) if place not in self._settled})
        return accepted

    def _settle(self, taken: Mapping[int, int]) -> None:
        self._settled |= taken.keys()
        self._outputs.settle(taken)

    def _walk(
        self, place: int, text: Text, walks: Walks, emitted: Sequence[int], nodes: list[int]
    ) -> Acceptance:
        if emitted:
            count = text.ends_after(emitted)
            if not text.over and nodes[count - 1] >= 0:
                self._outputs.choose(place, nodes[count - 1] + 1, emitted)
            return Acceptance(nodes[: count - 1], walks.tokens[place, :count])
        return accept(self._trees[place], lambda row, said: self._outputs.choose(place, row, said), text.ends)

    def _learn(self, places: Sequence[int]) -> None:
        """Pass the results to the drafters, with the optional data that they need, and to the planners."""
        done = [(self.texts[place], self._accepted[place]) for place in places]
        sessions, accepted = [text.session for text, _ in done], [each for _, each in done if each]
        slots, wanted = sessions[0].slots, [session.slot for session in sessions]
        hidden, candidates = None, list[NDArray[np.int32] | None]()
        if any(session.needs_candidates for session in sessions):
            candidates = [
                self._outputs.candidates(place) if session.needs_candidates else None
                for place, session in zip(places, sessions, strict=True)
            ]
        if any(session.needs_hidden for session in sessions):
            hidden = self._outputs.hidden(
                places, [each.path[-1] + 1 if each.path else 0 for each in accepted]
            )
        proposed, drafts = (each.part(places) for each in (self._proposed, self._drafts))
        ids = np.concatenate([each.tokens for each in accepted])
        stops = np.cumsum([len(each.tokens) for each in accepted])
        errors = slots.observe(
            wanted,
            ids,
            stops,
            trees=LazyTrees(drafts),
            candidates=candidates,
            hidden=hidden,
        )
        errors |= learn_together([text.planner for text, _ in done], proposed, drafts, accepted, ids, stops)
        for place, error in errors.items():
            done[place][0].error = error
        self._outcomes = slots.outcomes([text.session.slot for text in self.texts])


def step(texts: Sequence[Text], model: Model) -> list[Step | Exception]:
    """Run one pass over texts; return the result or the error of each."""
    queued = QueuedPass(texts, model)
    queued.finish()
    return queued.results()


def decode(model: Model, text: Text) -> Iterator[Step]:
    """Decode one text to its end."""
    while not text.over:
        (done,) = step([text], model)
        if isinstance(done, Exception):
            raise done
        yield done


def _draft(texts: Sequence[Text], room: int) -> tuple[DraftBatch, DraftBatch]:
    """Return what drafters propose, and what to verify of it; an invalid draft is an error of its text.

    Texts draft together; if that fails, one by one, to find the one that fails.
    """
    try:
        depths = [text.depth() for text in texts]
        budgets = [
            min(room, text.planner.budget()) if depth > 0 else 0
            for text, depth in zip(texts, depths, strict=True)
        ]
        slots, least = texts[0].session.slots, [text.min_prob for text in texts]
        proposed = slots.propose([text.session.slot for text in texts], budgets, least)
        limits = np.empty((len(texts), 3), np.int64)
        limits[:, 0], limits[:, 1], limits[:, 2] = room, depths, [text.vocab_size for text in texts]
        drafts, errors = within_limits(proposed, limits)
        trimmed, others = _trim([text.planner for text in texts], drafts, limits)
        for place, error in (errors | others).items():
            texts[place].error = error
        return proposed, trimmed  # noqa: TRY300 (errors of the loop above, too, would be of one text)
    except Exception as error:  # noqa: BLE001 (of one text: the others continue)
        if len(texts) == 1:
            texts[0].error = error
            return DraftBatch.empty(1), DraftBatch.empty(1)
        each = [_draft([text], room) for text in texts]
        return DraftBatch.joined([one for one, _ in each]), DraftBatch.joined([one for _, one in each])


def _trim(
    planners: Sequence[Planner], drafts: DraftBatch, limits: NDArray[np.int64]
) -> tuple[DraftBatch, dict[int, Exception]]:
    """Return what to verify, and errors by text: planners of other kinds may return any tree."""
    trimmed = trim_together(planners, drafts)
    if all(type(planner) in (Fixed, CostPlanner) for planner in planners):
        return trimmed, {}
    return within_limits(trimmed, limits)
