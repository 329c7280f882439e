"""The decode loop: propose, run a forward pass, accept, repeat. It is the same for every model and drafter.

    for step in decode(target, session, ends=...):
        text.extend(step.tokens)

The model is a `Target`: it runs the forward pass and keeps its cache. The output is exact whatever the drafter
proposes: see `draftstore.decoding.acceptance`.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter_ns
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from draftstore.decoding.acceptance import Acceptance, accept
from draftstore.drafting.drafter import Session
from draftstore.trees.chains import best_chain
from draftstore.trees.tree import DraftTree


class Verdict(Protocol):
    """The target model's outputs for a tree of n nodes, after one forward pass over its n + 1 rows."""

    def choose(self, row: int, emitted: Sequence[int]) -> int:
        """Return the token that the model emits at a row; see `draftstore.decoding.acceptance.Choose`."""

    def candidates(self) -> NDArray[np.int32] | None:
        """Return int32 [n + 1, 8], the most likely tokens at each row, best first; None if unknown."""

    def hidden(self, row: int) -> NDArray[np.float32] | None:
        """Return float32 [d], the last hidden state (after the final norm) at a row, projected as for the session."""


class Target(Protocol):
    """A model with a text, of which all but the last token are in its cache."""

    def verify(self, tree: DraftTree) -> Verdict:
        """Run one forward pass over the text's last token and a draft tree."""

    def keep(self, accepted: Acceptance) -> None:
        """Append accepted tokens to the text; all tokens but the last, the bonus token, are in the cache again."""


class Planner(Protocol):
    """Chooses how much of a draft to verify."""

    def begin(self) -> None:
        """Start a new text."""

    def budget(self) -> int:
        """Return the maximum useful nodes of a draft; 0 skips drafting."""

    def trim(self, tree: DraftTree) -> DraftTree:
        """Return the prefix of a tree to verify."""

    def learn(self, proposed: DraftTree, verified: DraftTree, accepted: Acceptance) -> None:
        """Learn from a draft's outcome."""


class Fixed:
    """The planner that verifies whole drafts, or the best chain of each, up to a budget."""

    def __init__(self, budget: int = 64, chain: int | None = None) -> None:
        """Ask for up to `budget` nodes; with `chain`, verify one path of at most so many of them."""
        self._budget = budget
        self._chain = chain

    def begin(self) -> None:
        """Do nothing."""

    def budget(self) -> int:
        """Return the budget."""
        return self._budget

    def trim(self, tree: DraftTree) -> DraftTree:
        """Return the tree, cut to the budget and to a chain if that is wanted."""
        tree = tree if len(tree) <= self._budget else tree.prefix(self._budget)
        return tree if self._chain is None else best_chain(tree, self._chain)

    def learn(self, proposed: DraftTree, verified: DraftTree, accepted: Acceptance) -> None:
        """Learn nothing."""


class Step(NamedTuple):
    """One forward pass and its result.

    Attributes:
        tree: the draft that was verified.
        path: its accepted nodes.
        tokens: int32 [len(path) + 1], the new tokens of the text.
        draft_ns: nanoseconds to propose and trim.
        forward_ns: nanoseconds to verify; on an asynchronous device to queue the pass, and `accept_ns` waits for it.
        accept_ns: nanoseconds to walk the tree and update the cache.
        text: number of the text, where several are decoded together; its nanoseconds are its share of theirs.
    """

    tree: DraftTree
    path: list[int]
    tokens: NDArray[np.int32]
    draft_ns: int
    forward_ns: int
    accept_ns: int
    text: int = 0


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

    def add(self, step: Step) -> None:
        """Add a step."""
        self.passes += 1
        self.tokens += len(step.tokens)
        self.drafted += len(step.tree)
        self.accepted += len(step.path)
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


class Speculation:
    """The drafts of one text: proposal, acceptance by the model, and feedback to drafter and planner; see `decode`."""

    def __init__(
        self,
        session: Session,
        planner: Planner,
        ends: Callable[[Sequence[int]], bool],
        min_prob: float = 0.0,
    ) -> None:
        self.session, self.planner, self.min_prob = session, planner, min_prob
        self.over = False
        self._ends = ends
        planner.begin()

    def propose(self) -> DraftTree:
        """Return the drafter's proposal, within the planner's budget."""
        budget = self.planner.budget()
        return self.session.propose(budget, self.min_prob) if budget > 0 else DraftTree.empty()

    def accept(self, tree: DraftTree, verdict: Verdict) -> Acceptance:
        """Return what the model emits, after a pass over a tree."""
        return accept(tree, verdict.choose, self._ends_here)

    def _ends_here(self, emitted: Sequence[int]) -> bool:
        self.over = self._ends(emitted)
        return self.over

    def learn(self, proposed: DraftTree, tree: DraftTree, verdict: Verdict, accepted: Acceptance) -> None:
        """Give the result to the drafter, with the optional data that it needs, and to the planner."""
        last_row = accepted.path[-1] + 1 if accepted.path else 0
        self.session.observe(
            accepted.tokens,
            tree=tree,
            candidates=verdict.candidates() if self.session.needs_candidates else None,
            hidden=verdict.hidden(last_row) if self.session.needs_hidden else None,
        )
        self.planner.learn(proposed, tree, accepted)


def decode(
    target: Target,
    session: Session,
    *,
    planner: Planner,
    ends: Callable[[Sequence[int]], bool],
    min_prob: float = 0.0,
) -> Iterator[Step]:
    """Decode until the text ends.

    Args:
        target: the model, with all but the last token of the text in its cache.
        planner: chooses how much of a draft is verified.
        ends: whether the text ends with the last token emitted in this step; called once for each token, in order, and
            may keep state.
    """
    text = Speculation(session, planner, ends, min_prob)
    while not text.over:
        begin = perf_counter_ns()
        proposed = text.propose()
        tree = planner.trim(proposed)
        drafted = perf_counter_ns()
        verdict = target.verify(tree)
        verified = perf_counter_ns()
        accepted = text.accept(tree, verdict)
        target.keep(accepted)
        text.learn(proposed, tree, verdict, accepted)
        done = perf_counter_ns()
        yield Step(tree, accepted.path, accepted.tokens, drafted - begin, verified - drafted, done - verified)
