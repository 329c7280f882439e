"""A mixture of several drafters: their trees for a step are merged into one.

    drafter = Mixture([RequestDrafter(vocab_size), store.drafter(), RecyclingDrafter(vocab_size)])

A drafter's probability of a node given its parent is p = P(node) / P(parent). The drafters that propose the node are
treated as independent, so the node is wrong only if all of them are wrong:

    P(node | parent) = 1 - product of (1 - s p)          a noisy-or (Pearl, 1988, section 4.3)

where s <= 1 is the drafter's reliability in this text so far: correct tokens divided by expected ones, where it made
predictions. Both counts start at three, and decay by a tenth whenever the drafter predicts again. So a confident but
wrong drafter soon loses weight, and one that copies a passage gains weight for as long as that lasts. Predictions are
compared with the actual text, whether or not a node was verified.

Sums, maxima and cascades perform about as well with two good drafters, but a bad third one misleads them
(docs/findings.md).

A drafter that raises while a text is drafted, or proposes an invalid tree, is disabled for the rest of that text and
counted (`Mixture.faults`).
"""

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from draftstore.drafting.drafter import DisabledSession, Drafter, Session, check_budget, check_ids
from draftstore.errors import DraftstoreError, DraftTreeError
from draftstore.jit import as_input, kernel, leaf_kernel
from draftstore.trees.frontier import BUDGET, MAX_DEPTH, finish, new_frontier
from draftstore.trees.tree import LEVEL_PROBS, LOWEST_LEVEL, DraftTree
from draftstore.trees.trie import keep_best, new_trie, place_nodes
from draftstore.trees.walk import steps_below, walk

LOG = logging.getLogger(__name__)
TRUST = 3.0
"""Initial counts of expected and correct tokens of every drafter."""
MEMORY = 0.9
"""Decay of the counts whenever a drafter predicts a token."""
_IDS = 2**31
_PROBS: NDArray[np.float64] = LEVEL_PROBS.astype(np.float64)


class Faults:
    """Number of texts for which each source of a mixture was disabled, by its position."""

    def __init__(self, sources: int) -> None:
        self.counts = [0] * sources

    def add(self, place: int, error: object) -> None:
        """Count a failure; the first, second, fourth, eighth, ... of a source is logged."""
        self.counts[place] += 1
        count = self.counts[place]
        if count & (count - 1) == 0:
            LOG.warning("drafter %d of a mixture has been disabled for %d texts: %s", place + 1, count, error)


class Mixture:
    """A `Drafter` that combines several drafters; with a single one, it is equivalent to that one.

    Attributes:
        faults: how often each drafter was disabled.
    """

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        """Mix one or more drafters of any kind; their order affects only rounding."""
        if not drafters:
            raise DraftstoreError("a mixture needs at least one drafter")
        self.drafters = tuple(drafters)
        self.faults = Faults(len(self.drafters))

    @property
    def needs_candidates(self) -> bool:
        """Whether a drafter is known to need candidates."""
        return any(getattr(drafter, "needs_candidates", False) for drafter in self.drafters)

    def session(
        self,
        prompt_ids: ArrayLike,
        *,
        hidden: NDArray[np.floating[Any]] | None = None,
        candidates: NDArray[np.int32] | None = None,
    ) -> Session:
        """Start the drafts of one text; DraftstoreError if a drafter rejects it, as one for another model does."""
        sessions = [
            drafter.session(prompt_ids, hidden=hidden, candidates=candidates) for drafter in self.drafters
        ]
        return sessions[0] if len(sessions) == 1 else MixtureSession(sessions, self.faults)

    def warm_up(self) -> None:
        """Compile the kernels, or load them from numba's cache, before the first draft; not the drafters' own."""
        one = DraftTree(np.zeros(1, np.int32), np.full(1, -1, np.int16), np.zeros(1, np.uint8))
        forest, seen = _Forest([one, one]), np.zeros((2, 2))
        forest.merge(seen, 1, LOWEST_LEVEL)
        forest.learn(np.zeros(1, np.int32), seen)


class MixtureSession:
    """The drafts for one text: a `Session` over several drafters' sessions.

    Attributes:
        sessions: the drafters' sessions, in order; `DisabledSession` in place of one that has failed.
        seen: float64 [drafters, 2], expected and correct tokens of each drafter.
        proposed: the last draft of each session, in order; empty if no draft was requested.
        accepted: number of tokens of each of these drafts that became part of the text.
    """

    def __init__(self, sessions: Sequence[Session], faults: Faults | None = None) -> None:
        self.sessions = tuple(sessions)
        self._faults = faults or Faults(len(sessions))
        self.needs_candidates = any(session.needs_candidates for session in sessions)
        self.needs_hidden = any(session.needs_hidden for session in sessions)
        self.seen = np.zeros((len(sessions), 2))
        self.proposed: Sequence[DraftTree] = ()
        self.matched: Sequence[int] = ()
        self._forest: _Forest | None = None

    def propose(self, budget: int = BUDGET, min_prob: float = 0.0) -> DraftTree:
        """Return a draft; each drafter proposes nodes of any probability, since another may confirm unlikely ones."""
        wanted = budget > 0 and check_budget(budget, min_prob) >= 0
        return self.merge(self.propose_each(budget) if wanted else [], budget, min_prob)

    def propose_each(self, budget: int) -> list[DraftTree]:
        """Return each session's proposal for `budget` nodes of any probability; sessions that raise are disabled."""
        trees = []
        for place, session in enumerate(self.sessions):
            try:
                trees.append(session.propose(budget))
            except Exception as error:  # noqa: BLE001 (of one source: the others go on)
                self._disable(place, error)
                trees.append(DraftTree.empty())
        return trees

    def merge(self, trees: Sequence[DraftTree], budget: int, min_prob: float = 0.0) -> DraftTree:
        """Return the draft merged from every session's proposal for `budget` nodes; see `propose`."""
        level = check_budget(budget, min_prob)
        self.proposed, self.matched, self._forest = (), (), None
        if budget == 0 or level < 0:
            return DraftTree.empty()
        while True:
            try:
                forest = _Forest(trees)
                merged = forest.merge(self.seen, budget, level)
            except WrongTreeError as error:
                self._disable(error.place, error)
                trees = [DraftTree.empty() if i == error.place else tree for i, tree in enumerate(trees)]
                continue
            self.proposed, self._forest = trees, forest
            return merged

    def _disable(self, place: int, error: Exception) -> None:
        self.sessions = (*self.sessions[:place], DisabledSession(), *self.sessions[place + 1 :])
        self._faults.add(place, error)

    def observe(
        self,
        accepted_ids: ArrayLike,
        *,
        tree: DraftTree | None = None,
        candidates: NDArray[np.int32] | None = None,
        hidden: NDArray[np.floating[Any]] | None = None,
    ) -> None:
        """Pass on the result of a forward pass (`tree` is the merged one), and score the last drafts."""
        ids = check_ids(accepted_ids, _IDS, parts=True)
        for place, session in enumerate(self.sessions):
            try:
                session.observe(accepted_ids, tree=tree, candidates=candidates, hidden=hidden)
            except Exception as error:  # noqa: BLE001 (of one source: the others go on)
                self._disable(place, error)
        if self._forest is not None and len(ids):
            self.matched = self._forest.learn(ids, self.seen)
            self._forest = None


class _Forest:
    """The concatenated trees of one step, as the kernels expect them."""

    def __init__(self, trees: Sequence[DraftTree]) -> None:
        self._arrays = join_trees(trees)

    def merge(self, seen: NDArray[np.float64], budget: int, max_level: int) -> DraftTree:
        """Merge the trees; WrongTreeError if one is invalid."""
        wrong, *arrays = merge_trees(*self._arrays, seen, budget, max_level)
        if wrong >= 0:
            tokens, parents, _, stops = self._arrays
            tree = int(np.searchsorted(stops, wrong, side="right"))
            node = wrong - (int(stops[tree - 1]) if tree else 0)
            raise WrongTreeError(
                tree,
                f"it proposed node {node} with token {tokens[wrong]} and parent {parents[wrong]}: expected a "
                "non-negative id, and -1 or an earlier node as parent",
            )
        return DraftTree(*arrays)

    def learn(self, ids: NDArray[np.integer[Any]], seen: NDArray[np.float64]) -> list[int]:
        matched: list[int] = count_outcomes(*self._arrays, as_input(ids, np.int32), seen).tolist()
        return matched


@kernel
def merge_trees(
    tokens: Any, parents: Any, levels: Any, stops: Any, seen: Any, budget: Any, max_level: Any
) -> Any:
    """Merge concatenated draft trees; `seen` float64 [trees, 2] as in `MixtureSession`.

    Returns:
        -1 or the first node with an invalid parent or token; tokens int32 [n], parents int16 [n], levels uint8 [n].
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
    """Count in `seen` each tree's expected and correct tokens along the actual ones, `ids` int32 [any].

    Returns:
        int64 [trees], number of actual tokens that each tree contained.
    """
    start, matched = np.int64(0), np.empty(len(stops), np.int64)
    for tree in range(len(stops)):
        stop = stops[tree]
        state = parents[start:stop], levels[start:stop], seen[tree]
        matched[tree] = walk(tokens[start:stop], parents[start:stop], ids, _count_children, state)
        start = stop
    return matched


@leaf_kernel
def _count_children(state: Any, node: Any, child: Any) -> Any:
    """Count the expected and correct tokens among a node's children; see `draftstore.trees.walk.walk`."""
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
    """Return the first node whose parent does not precede it or whose token is negative; -1 if there is none."""
    start = np.int64(0)
    for tree in range(len(stops)):
        for node in range(start, stops[tree]):
            if parents[node] < -1 or parents[node] >= node - start or tokens[node] < 0:
                return np.int64(node)
        start = stops[tree]
    return np.int64(-1)


@kernel
def _find_chances(trie: Any, tokens: Any, parents: Any, levels: Any, stops: Any, seen: Any) -> Any:
    """Fill a trie with the nodes of all trees and their probabilities."""
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
    for place in range(1, size):  # parents come before their children
        trie.probs[place] = trie.probs[above[place]] * (1.0 - doubts[place])


class WrongTreeError(DraftTreeError):
    """An invalid proposal; `place` is the position of its session."""

    def __init__(self, place: int, message: str) -> None:
        super().__init__(message)
        self.place = place


def join_trees(trees: Sequence[DraftTree]) -> tuple[NDArray[Any], ...]:
    """Return tokens int32, parents int16 and levels uint8 of all nodes, and the end of each tree, int64 [trees]."""
    try:
        return _join(trees)
    except Exception:
        for place, tree in enumerate(trees):
            try:
                _join([tree])
            except Exception as error:
                raise WrongTreeError(place, f"its proposal is not a tree: {error}") from error
        raise


def _join(trees: Sequence[DraftTree]) -> tuple[NDArray[Any], ...]:
    """Join trees; any exception means that one is invalid."""
    tokens = np.concatenate([tree.tokens for tree in trees], dtype=np.int32)
    parents = np.concatenate([tree.parents for tree in trees], dtype=np.int16)
    levels = np.concatenate([tree.levels for tree in trees], dtype=np.uint8)
    stops = np.cumsum([len(tree.tokens) for tree in trees], dtype=np.int64)
    if (
        not tokens.shape == parents.shape == levels.shape == (stops[-1],)
    ):  # otherwise kernels would read past their ends
        raise DraftTreeError(
            f"tokens {tokens.shape}, parents {parents.shape}, levels {levels.shape}: expected one of each per node"
        )
    return tokens, parents, levels, stops
