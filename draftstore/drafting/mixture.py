"""Several drafters as one: their trees of a step become one tree, by how probable each makes a node.

    drafter = Mixture([RequestDrafter(vocab_size), store.drafter(), RecyclingDrafter(vocab_size)])

A drafter says of each node how likely it follows its parent: p = P(node) / P(parent). The drafters whose trees hold the
node are taken as independent witnesses, so it fails to follow only if all of them are wrong:

    P(node | parent) = 1 - product of (1 - s p)          a noisy-or

where s <= 1 says how far that drafter's word held in this text so far: the tokens that came where it foretold any, by
those that it expected. Both counts begin at three, and a tenth of what was seen is forgotten whenever the drafter
foretells again. So one that is sure and wrong is soon not listened to, and one that copies a passage is, while that
lasts. Whether a node was verified does not matter: what was foretold is compared with the text that came. "Noisy-or" as
in Pearl, Probabilistic Reasoning in Intelligent Systems, 1988, section 4.3.

Sums with fixed or learned weights, maxima, and the rule that the next drafter gets what the first leaves unsaid make
about as much of two good drafters, but a bad third one misleads them: `python -m benchmarks.request` compares them.

Dense stores want hidden states in spaces of their own. Where one space suits all that want any, the target model is
asked for states in that; else it is asked for the states themselves, and they are projected here for each.

Drafts depend on nothing but the text, and on what the drafters proposed for it.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from draftstore.drafting.drafter import Drafter, Session, check_budget, check_ids, projection_of
from draftstore.drafting.projection import Projection
from draftstore.errors import DraftstoreError, DraftTreeError
from draftstore.jit import as_input, kernel, leaf_kernel
from draftstore.trees.blend import keep_best, new_trie, place_nodes
from draftstore.trees.frontier import MAX_DEPTH, finish, new_frontier
from draftstore.trees.tree import LEVEL_PROBS, LOWEST_LEVEL, DraftTree
from draftstore.trees.walk import steps_below, walk

TRUST = 3.0
"""Tokens that came true as expected, which every drafter begins with."""
MEMORY = 0.9
"""What is left of the counts whenever a drafter foretells a token."""
_IDS = 2**31
_PROBS: NDArray[np.float64] = LEVEL_PROBS.astype(np.float64)


class Mixture:
    """A `Drafter` of several; a mixture of one is that one.

    Attributes:
        drafters: in their order.
    """

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        """Mix drafters of any kind; their order matters to the last bits of the probabilities alone.

        Raises:
            DraftstoreError: none is given.
        """
        if not drafters:
            raise DraftstoreError("a mixture needs at least one drafter")
        self.drafters = tuple(drafters)

    @property
    def needs_hidden(self) -> bool:
        """Whether one of the drafters is known to want hidden states."""
        return _HiddenNeeds(self.drafters).any

    @property
    def projection(self) -> Projection | None:
        """What all that want hidden states want them projected with; None if they differ, or none does.

        It changes when that of a drafter does, as that of a release of the lookup service may between texts.
        """
        return _HiddenNeeds(self.drafters).projection

    def session(
        self,
        prompt_ids: ArrayLike,
        *,
        hidden: NDArray[np.float32] | None = None,
        candidates: NDArray[np.int32] | None = None,
    ) -> Session:
        """Start the drafts of one text; see `Drafter.session`."""
        needs = _HiddenNeeds(self.drafters)
        if hidden is not None and not needs.fits(hidden):
            hidden = None  # a projection has changed since the state was asked for
        sessions = [
            drafter.session(prompt_ids, hidden=state, candidates=candidates)
            for drafter, state in zip(self.drafters, needs.for_parts(hidden), strict=True)
        ]
        return sessions[0] if len(sessions) == 1 else MixtureSession(sessions)

    def warm_up(self) -> None:
        """Compile the kernels, or load them from numba's cache, before the first draft is waited for.

        Those of the drafters are their own affair.
        """
        one = DraftTree(np.zeros(1, np.int32), np.full(1, -1, np.int16), np.zeros(1, np.uint8))
        forest, seen = _Forest([one, one]), np.zeros((2, 2))
        forest.merge(seen, 1, LOWEST_LEVEL)
        forest.learn(np.zeros(1, np.int32), seen)


class MixtureSession:
    """The drafts of one text: a `Session` over those of several drafters.

    What raises in one of them raises here; their own answer to trouble is an empty tree.

    Attributes:
        sessions: of the drafters, in their order.
        needs_candidates: whether one of them does.
        needs_hidden: likewise.
        projection: what all that want hidden states want them projected with; None if they differ, or none does.
        seen: float64 [drafters, 2], tokens that each expected, and those of them that came.
    """

    def __init__(self, sessions: Sequence[Session]) -> None:
        """Merge the drafts of `sessions`."""
        self.sessions = tuple(sessions)
        self.needs_candidates = any(session.needs_candidates for session in sessions)
        self._needs = _HiddenNeeds(self.sessions)
        self.needs_hidden = self._needs.any
        self.projection = self._needs.projection
        self.seen = np.zeros((len(sessions), 2))
        self._forest: _Forest | None = None

    def propose(self, budget: int = 64, min_prob: float = 0.0) -> DraftTree:
        """Return a draft of at most `budget` nodes, each of at least `min_prob`; see `Session`.

        Each drafter is asked for `budget` nodes of any probability: what one of them doubts another may confirm.

        Raises:
            DraftstoreError: the budget is not within 0 .. 4,096.
            DraftTreeError: what a drafter proposed is no tree.
        """
        level = check_budget(budget, min_prob)
        self._forest = None
        if budget == 0 or level < 0:
            return DraftTree.empty()
        self._forest = _Forest([session.propose(budget) for session in self.sessions])
        return self._forest.merge(self.seen, budget, level)

    def observe(
        self,
        accepted_ids: ArrayLike,
        *,
        tree: DraftTree | None = None,
        candidates: NDArray[np.int32] | None = None,
        hidden: NDArray[np.float32] | None = None,
    ) -> None:
        """Pass on what a forward pass settled, as it came (`tree` is the merged one), and judge the last drafts."""
        ids = check_ids(accepted_ids, _IDS)
        for session, state in zip(self.sessions, self._needs.for_parts(hidden), strict=True):
            session.observe(accepted_ids, tree=tree, candidates=candidates, hidden=state)
        if self._forest is not None and len(ids):
            self._forest.learn(ids, self.seen)
            self._forest = None


class _HiddenNeeds:
    """Which hidden states the parts of a mixture (drafters or sessions) need.

    Attributes:
        any: whether a part is known to want some: it has a projection, or says `needs_hidden`.
        projection: that of all these parts; None if they differ, or one wants states as they are.
    """

    def __init__(self, parts: Sequence[Drafter | Session]) -> None:
        self._own = [projection_of(part) for part in parts]
        wanted = [
            own
            for part, own in zip(parts, self._own, strict=True)
            if own is not None or getattr(part, "needs_hidden", False)
        ]
        self.any = bool(wanted)
        shared = len({own.digest if own is not None else None for own in wanted}) == 1
        self.projection: Projection | None = wanted[0] if shared else None

    def fits(self, hidden: NDArray[np.float32]) -> bool:
        """Tell whether a state is of the size that was asked for."""
        if self.projection is not None:
            return hidden.shape == (self.projection.dims,)
        return all(own is None or hidden.shape == (own.hidden_size,) for own in self._own)

    def for_parts(self, hidden: NDArray[np.float32] | None) -> list[NDArray[np.float32] | None]:
        """Return the state for each part.

        Args:
            hidden: float32 [d], projected if there is a projection of all.
        """
        if hidden is None:
            return [None] * len(self._own)
        if self.projection is not None:  # means nothing to parts without one
            return [None if own is None else hidden for own in self._own]
        return [hidden if own is None else own.apply(hidden) for own in self._own]


class _Forest:
    """The trees of one step, one behind the other, as the kernels take them."""

    def __init__(self, trees: Sequence[DraftTree]) -> None:
        self._arrays = (
            np.concatenate([tree.tokens for tree in trees], dtype=np.int32),
            np.concatenate([tree.parents for tree in trees], dtype=np.int16),
            np.concatenate([tree.levels for tree in trees], dtype=np.uint8),
            np.cumsum([len(tree) for tree in trees], dtype=np.int64),
        )

    def merge(self, seen: NDArray[np.float64], budget: int, max_level: int) -> DraftTree:
        """Return one tree.

        Raises:
            DraftTreeError: a tree is none.
        """
        wrong, *arrays = merge_trees(*self._arrays, seen, budget, max_level)
        if wrong >= 0:
            tokens, parents, _, stops = self._arrays
            tree = int(np.searchsorted(stops, wrong, side="right"))
            node = wrong - (int(stops[tree - 1]) if tree else 0)
            raise DraftTreeError(
                f"drafter {tree + 1} of a mixture proposed node {node} with token {tokens[wrong]} and parent "
                f"{parents[wrong]}: expected an id of at least 0, and -1 or an earlier node"
            )
        return DraftTree(*arrays)

    def learn(self, ids: NDArray[np.integer[Any]], seen: NDArray[np.float64]) -> None:
        """Count what came true of each tree."""
        count_outcomes(*self._arrays, as_input(ids, np.int32), seen)


@kernel
def merge_trees(
    tokens: Any, parents: Any, levels: Any, stops: Any, seen: Any, budget: Any, max_level: Any
) -> Any:
    """Merge draft trees that stand one behind the other.

    Args:
        tokens: int32 [all nodes].
        parents: int16 [all nodes], counted inside each tree.
        levels: uint8 [all nodes].
        stops: int64 [trees], node after the last of each tree.
        seen: float64 [trees, 2], tokens that each drafter expected, and those of them that came.
        budget: most nodes of the merged tree.
        max_level: highest level that a node may have.

    Returns:
        -1 or the first node with a wrong parent or token; tokens int32 [n], parents int16 [n], levels uint8 [n].
    """
    nodes = new_frontier(budget)
    wrong, count = _find_wrong(tokens, parents, stops), 0
    if wrong < 0:
        trie = new_trie(len(tokens) + 1)
        _find_chances(trie, tokens, parents, levels, stops, seen)
        count = keep_best(trie, nodes, np.empty(budget + 1, np.int64), MAX_DEPTH, max_level)
    best_tokens, best_parents, best_levels = finish(nodes, count)
    return wrong, best_tokens, best_parents, best_levels


@kernel
def count_outcomes(tokens: Any, parents: Any, levels: Any, stops: Any, ids: Any, seen: Any) -> Any:
    """Count what each tree expected along the tokens that came, and what came.

    Args:
        tokens: see `merge_trees`, as for the next three.
        parents: likewise.
        levels: likewise.
        stops: likewise.
        ids: int32 [any], read-only, the tokens that came.
        seen: float64 [trees, 2], see `merge_trees`; is changed.
    """
    start = np.int64(0)
    for tree in range(len(stops)):
        stop = stops[tree]
        state = parents[start:stop], levels[start:stop], seen[tree]
        walk(tokens[start:stop], parents[start:stop], ids, _count_children, state)
        start = stop


@leaf_kernel
def _count_children(state: Any, node: Any, child: Any) -> Any:
    """Count what a tree expected of a node's children, and whether one came; see `draftstore.trees.walk.walk`."""
    parents, levels, seen = state
    expected = 0.0
    for i in range(node + 1, len(parents)):
        if parents[i] == node:
            expected += _PROBS[steps_below(levels, i, node)]
    if expected > 0.0:
        seen[0] = MEMORY * seen[0] + expected
        seen[1] = MEMORY * seen[1] + (1.0 if child >= 0 else 0.0)


@leaf_kernel
def _find_wrong(tokens: Any, parents: Any, stops: Any) -> Any:
    """Return the first node whose parent is no earlier one, or whose token is no id; -1 if there is none."""
    start = np.int64(0)
    for tree in range(len(stops)):
        for node in range(start, stops[tree]):
            if parents[node] < -1 or parents[node] >= node - start or tokens[node] < 0:
                return np.int64(node)
        start = stops[tree]
    return np.int64(-1)


@kernel
def _find_chances(trie: Any, tokens: Any, parents: Any, levels: Any, stops: Any, seen: Any) -> Any:
    """Fill a trie with the nodes of all trees and their chances."""
    places, above = np.empty(len(tokens), np.int64), np.zeros(len(tokens) + 1, np.int64)
    doubts = np.ones(len(tokens) + 1)
    size, start = 1, np.int64(0)
    for tree in range(len(stops)):
        size = place_nodes(trie, size, tokens, parents, start, stops[tree], places)
        held = min(1.0, (seen[tree, 1] + TRUST) / (seen[tree, 0] + TRUST))
        own = levels[start : stops[tree]]
        for node in range(start, stops[tree]):
            parent = np.int64(parents[node])
            doubts[places[node]] *= 1.0 - held * _PROBS[steps_below(own, node - start, parent)]
            above[places[node]] = places[start + parent] if parent >= 0 else 0
        start = stops[tree]
    trie.probs[0] = 1.0
    for place in range(1, size):  # parents stand before their children
        trie.probs[place] = trie.probs[above[place]] * (1.0 - doubts[place])
