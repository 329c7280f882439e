"""Other ways to make one tree of several, in plain Python: what `draftstore.drafting.mixture` was chosen among."""

import heapq
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from draftstore.drafting.drafter import Drafter, Session
from draftstore.drafting.mixture import MixtureSession
from draftstore.trees.tree import DraftTree, level_of

Path = tuple[int, ...]


class Paths(NamedTuple):
    """A tree by paths from the context.

    Attributes:
        chances: of each path.
        follows: chance that each path follows what leads to it.
        unsaid: what each inner path, `()` among them, leaves to tokens that are not in the tree.
    """

    chances: dict[Path, float]
    follows: dict[Path, float]
    unsaid: dict[Path, float]


Rule = Callable[[Sequence[Paths], Sequence[float]], dict[Path, float]]
"""`rule(trees, trusts)`: the chance of every path; `trusts` says how far each drafter's word held in this text."""


def _paths_of(tree: DraftTree) -> Paths:
    """Return a tree by paths."""
    names: list[Path] = []
    found = Paths({}, {}, {})
    rows = zip(tree.tokens.tolist(), tree.parents.tolist(), tree.probs.tolist(), strict=True)
    for token, parent, prob in rows:
        above = names[parent] if parent >= 0 else ()
        names.append((*above, token))
        found.chances[names[-1]] = prob
        found.follows[names[-1]] = prob / found.chances.get(above, 1.0)
        found.unsaid[above] = max(0.0, found.unsaid.get(above, 1.0) - found.follows[names[-1]])
    return found


def _all_paths(trees: Sequence[Paths]) -> list[Path]:
    """Return the paths of all trees, parents first."""
    return sorted(dict.fromkeys(path for tree in trees for path in tree.chances), key=len)


def _along(trees: Sequence[Paths], follows: Callable[[Path], float]) -> dict[Path, float]:
    """Return the chances of all paths by the chance that each follows what leads to it."""
    chances: dict[Path, float] = {(): 1.0}
    for path in _all_paths(trees):
        chances[path] = chances[path[:-1]] * min(1.0, follows(path))
    del chances[()]
    return chances


def _mean(trees: Sequence[Paths], _trusts: Sequence[float]) -> dict[Path, float]:
    """Add up the chances of a path, each drafter weighing the same: what `draftstore.trees.blend` does."""
    return {path: sum(t.chances.get(path, 0.0) for t in trees) / len(trees) for path in _all_paths(trees)}


def _trusted_mean(trees: Sequence[Paths], trusts: Sequence[float]) -> dict[Path, float]:
    """Add up the chances of a path, each drafter weighing as much as its word held."""
    whole = sum(trusts)
    return {
        path: sum(w * t.chances.get(path, 0.0) for t, w in zip(trees, trusts, strict=True)) / whole
        for path in _all_paths(trees)
    }


def _highest(trees: Sequence[Paths], _trusts: Sequence[float]) -> dict[Path, float]:
    """Take the highest chance of a path."""
    return {path: max(tree.chances.get(path, 0.0) for tree in trees) for path in _all_paths(trees)}


def _trusted_highest(trees: Sequence[Paths], trusts: Sequence[float]) -> dict[Path, float]:
    """Take, at each node, the highest trusted chance that it follows."""
    pairs = list(zip(trees, trusts, strict=True))
    return _along(trees, lambda path: max(trust * tree.follows.get(path, 0.0) for tree, trust in pairs))


def _leftover(trees: Sequence[Paths], _trusts: Sequence[float]) -> dict[Path, float]:
    """Give each drafter, from the last to the first, what those after it leave unsaid at a node."""

    def follows(path: Path) -> float:
        total, left = 0.0, 1.0
        for tree in reversed(trees):
            total += left * tree.follows.get(path, 0.0)
            left *= tree.unsaid.get(path[:-1], 1.0)
        return total

    return _along(trees, follows)


def _noisy_or(trees: Sequence[Paths], trusts: Sequence[float]) -> dict[Path, float]:
    """Let a node fail to follow only if all drafters that say it does are wrong."""
    pairs = list(zip(trees, trusts, strict=True))

    def follows(path: Path) -> float:
        doubt = 1.0
        for tree, trust in pairs:
            doubt *= 1.0 - trust * tree.follows.get(path, 0.0)
        return 1.0 - doubt

    return _along(trees, follows)


def _blind_noisy_or(trees: Sequence[Paths], trusts: Sequence[float]) -> dict[Path, float]:
    """Trust every drafter all the time."""
    return _noisy_or(trees, [1.0] * len(trusts))


RULES: dict[str, Rule] = {
    "mean": _mean,
    "mean, weights learned": _trusted_mean,
    "highest": _highest,
    "highest, trust learned": _trusted_highest,
    "what the store leaves unsaid": _leftover,
    "noisy-or": _blind_noisy_or,
    "noisy-or, trust learned": _noisy_or,
}


class RuleMixture:
    """A `Drafter` that merges by one of `RULES`."""

    def __init__(self, drafters: Sequence[Drafter], rule: Rule, trust: float, memory: float) -> None:
        """Merge by `rule`; see `draftstore.drafting.mixture` for the two constants of what is learned."""
        self._drafters = tuple(drafters)
        self._rule = rule
        self._constants = trust, memory

    def session(self, prompt_ids: ArrayLike, **prefill: Any) -> "RuleSession":
        """Start the drafts of one text."""
        sessions = [drafter.session(prompt_ids, **prefill) for drafter in self._drafters]
        return RuleSession(sessions, self._rule, *self._constants)


class RuleSession(MixtureSession):
    """The drafts of one text."""

    def __init__(self, sessions: Sequence[Session], rule: Rule, trust: float, memory: float) -> None:
        """Merge by a rule."""
        super().__init__(sessions)
        self._rule = rule
        self._trust = trust
        self._memory = memory
        self._trees: list[Paths] = []

    def propose(self, budget: int = 64, min_prob: float = 0.0) -> DraftTree:  # noqa: ARG002
        """Return a draft; nodes of any probability may be in it."""
        self._trees = [_paths_of(session.propose(budget)) for session in self.sessions]
        trusts = np.minimum(1.0, (self.seen[:, 1] + self._trust) / (self.seen[:, 0] + self._trust))
        return _best(self._rule(self._trees, trusts.tolist()), budget)

    def observe(self, accepted_ids: ArrayLike, **feedback: Any) -> None:
        """Pass on what was settled, and learn."""
        for session in self.sessions:
            session.observe(accepted_ids, **feedback)
        came = np.asarray(accepted_ids).tolist()
        for seen, tree in zip(self.seen, self._trees, strict=False):
            for size in range(len(came)):
                above = tuple(came[:size])
                if above not in tree.unsaid:
                    break
                seen *= self._memory
                seen += 1.0 - tree.unsaid[above], (*above, came[size]) in tree.chances
        self._trees = []


def _best(chances: dict[Path, float], budget: int) -> DraftTree:
    """Return the likeliest paths as a tree."""
    children: dict[Path, list[Path]] = {}
    for path in chances:
        children.setdefault(path[:-1], []).append(path)
    waiting: list[tuple[float, int, int, int, Path]] = []
    nodes: list[tuple[int, int, int]] = []
    parent, path = -1, ()
    while True:
        for child in children.get(path, ()):
            heapq.heappush(waiting, (-chances[child], len(child), child[-1], parent, child))
        if not waiting or len(nodes) == budget:
            break
        chance, _, token, above, path = heapq.heappop(waiting)
        nodes.append((token, above, min(255, level_of(-chance))))
        parent = len(nodes) - 1
    columns = np.array(nodes, np.int64).reshape(-1, 3).T
    return DraftTree(columns[0].astype(np.int32), columns[1].astype(np.int16), columns[2].astype(np.uint8))


class ConfidentlyWrong:
    """A `Drafter` of one long path of random ids, each of which it is quite sure of."""

    def __init__(self, vocab_size: int) -> None:
        """Draw ids below `vocab_size`."""
        self._vocab_size = vocab_size

    def session(self, prompt_ids: ArrayLike, **_prefill: Any) -> "WrongSession":
        """Start the drafts of one text."""
        return WrongSession(self._vocab_size, len(np.asarray(prompt_ids)))


class WrongSession:
    """The drafts of one text; they depend on its length alone."""

    needs_candidates = False
    needs_hidden = False

    def __init__(self, vocab_size: int, size: int) -> None:
        """Start from a text of `size` tokens."""
        self._vocab_size = vocab_size
        self._size = size

    def propose(self, budget: int = 64, min_prob: float = 0.0) -> DraftTree:  # noqa: ARG002
        """Return a path, each token of which follows with 92 %."""
        length = min(budget, 63)
        ids = np.random.default_rng(self._size).integers(0, self._vocab_size, length)
        places = np.arange(length)
        return DraftTree(ids.astype(np.int32), (places - 1).astype(np.int16), (2 * places).astype(np.uint8))

    def observe(self, accepted_ids: ArrayLike, **_feedback: Any) -> None:
        """Count the tokens."""
        self._size += len(np.asarray(accepted_ids))
