"""The decode loop: propose, one forward pass, accept, go on. It exists once, for every model and every drafter.

    for step in decode(target, session, ends=...):
        text.extend(step.tokens)

The model is a `Target`: what runs the forward pass and keeps its cache (`draftstore.hf` for transformers, a recorded
output in `draftstore.decoding.replay`). Everything here is exact whatever the drafter proposes: see
`draftstore.decoding.acceptance`.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter_ns
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from draftstore.decoding.acceptance import Acceptance, accept
from draftstore.drafting.drafter import Session
from draftstore.trees.tree import DraftTree


class Verdict(Protocol):
    """What the target model says of a tree of n nodes, after one forward pass over its n + 1 rows."""

    def choose(self, row: int, emitted: Sequence[int]) -> int:
        """Return the token that the model emits at a row; see `draftstore.decoding.acceptance.Choose`."""

    def candidates(self) -> NDArray[np.int32] | None:
        """Return int32 [n + 1, 8], the most likely tokens at each row, best first; None if they are not known."""

    def hidden(self, row: int) -> NDArray[np.float32] | None:
        """Return float32 [d], the last hidden state (after the final norm) at a row; None if it is not known.

        It is projected, if the session that is told of it has a projection.
        """


class Target(Protocol):
    """A model that holds a text of which all but the last token are in its cache."""

    def verify(self, tree: DraftTree) -> Verdict:
        """Run one forward pass over the text's last token and a draft tree."""

    def keep(self, accepted: Acceptance) -> None:
        """Take what was accepted into the text: the rows of the root and of the path stay in the cache.

        Then all tokens but the last (the bonus) are in the cache again.
        """


class Planner(Protocol):
    """Chooses how much of a draft is worth verifying."""

    def begin(self) -> None:
        """Start a new text."""

    def budget(self) -> int:
        """Return the most nodes that could be worth it now; 0 spares the question."""

    def trim(self, tree: DraftTree) -> DraftTree:
        """Return the prefix of a tree that is worth its cost."""

    def learn(self, proposed: DraftTree, verified: DraftTree, accepted: Acceptance) -> None:
        """Take in how a draft fared."""


class Fixed:
    """The planner that verifies all it is given, up to a budget."""

    def __init__(self, budget: int = 64) -> None:
        """Ask for `budget` nodes every time."""
        self._budget = budget

    def begin(self) -> None:
        """Do nothing: all texts are alike."""

    def budget(self) -> int:
        """Return the budget."""
        return self._budget

    def trim(self, tree: DraftTree) -> DraftTree:
        """Return the tree, cut to the budget in case the drafter gave more."""
        return tree if len(tree) <= self._budget else tree.prefix(self._budget)

    def learn(self, proposed: DraftTree, verified: DraftTree, accepted: Acceptance) -> None:
        """Learn nothing."""


class Step(NamedTuple):
    """One forward pass and what it yielded.

    Attributes:
        tree: the draft that was verified.
        path: its nodes that were accepted.
        tokens: int32 [len(path) + 1], what the text grew by.
        draft_ns: nanoseconds to propose and trim.
        forward_ns: to verify. On a device that runs ahead this ends when the pass is queued, and what it takes shows
            in `accept_ns`, which waits for the result.
        accept_ns: to walk the tree and to put the cache in order.
    """

    tree: DraftTree
    path: list[int]
    tokens: NDArray[np.int32]
    draft_ns: int
    forward_ns: int
    accept_ns: int


@dataclasses.dataclass
class Tally:
    """Totals of steps.

    Attributes:
        passes: forward passes.
        tokens: tokens that they yielded.
        drafted: nodes that were verified.
        accepted: nodes that were accepted.
        draft_ns: nanoseconds, as in `Step`, like the next two.
        forward_ns: likewise.
        accept_ns: likewise.
    """

    passes: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    draft_ns: int = 0
    forward_ns: int = 0
    accept_ns: int = 0

    def add(self, step: Step) -> None:
        """Count a step."""
        self.passes += 1
        self.tokens += len(step.tokens)
        self.drafted += len(step.tree)
        self.accepted += len(step.path)
        self.draft_ns += step.draft_ns
        self.forward_ns += step.forward_ns
        self.accept_ns += step.accept_ns

    @property
    def accepted_length(self) -> float:
        """Tokens a pass; plain decoding is 1.0."""
        return self.tokens / self.passes if self.passes else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted nodes by verified ones; 0 if none was."""
        return self.accepted / self.drafted if self.drafted else 0.0


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
        target: the model, with the prompt in its cache but for the last token of the text.
        session: the drafter's, which knows the whole text.
        planner: how much of a draft is verified.
        ends: whether the text ends with the last of the tokens emitted in this step; it is called once for each, in
            order, and may keep count.
        min_prob: least probability of a drafted node.
    """
    over = False

    def ends_here(emitted: Sequence[int]) -> bool:
        nonlocal over
        over = ends(emitted)
        return over

    planner.begin()
    while not over:
        begin = perf_counter_ns()
        budget = planner.budget()
        proposed = session.propose(budget, min_prob) if budget > 0 else DraftTree.empty()
        tree = planner.trim(proposed)
        drafted = perf_counter_ns()
        verdict = target.verify(tree)
        verified = perf_counter_ns()
        accepted = accept(tree, verdict.choose, ends_here)
        target.keep(accepted)
        _tell(session, tree, verdict, accepted)
        planner.learn(proposed, tree, accepted)
        done = perf_counter_ns()
        yield Step(tree, accepted.path, accepted.tokens, drafted - begin, verified - drafted, done - verified)


def _tell(session: Session, tree: DraftTree, verdict: Verdict, accepted: Acceptance) -> None:
    """Tell the drafter what a pass settled, and as much of the rest as it wants."""
    last_row = accepted.path[-1] + 1 if accepted.path else 0
    session.observe(
        accepted.tokens,
        tree=tree,
        candidates=verdict.candidates() if session.needs_candidates else None,
        hidden=verdict.hidden(last_row) if session.needs_hidden else None,
    )
