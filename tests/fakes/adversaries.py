"""Drafters that must not mislead any decoder: random ones, always wrong ones, and perfect ones."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from draftstore.trees.tree import DraftTree, level_of

Path = tuple[int, ...]


def tree_of(paths: Mapping[Path, float] | Iterable[Path]) -> DraftTree:
    """Return the canonical tree of some paths, and of all paths to them.

    Args:
        paths: the chance of each path; without one it halves from token to token. None is above what leads to it.
    """
    chances = paths if isinstance(paths, Mapping) else dict.fromkeys(paths, 0.0)
    levels: dict[Path, int] = {(): 0}
    for path in sorted({given[:size] for given in chances for size in range(1, len(given) + 1)}, key=len):
        level = level_of(chances.get(path, 0.0) or 0.5 ** len(path))
        levels[path] = min(255, max(levels[path[:-1]], level))
    del levels[()]
    order = sorted(levels, key=lambda path: _rank(path, levels))
    place = {path: node for node, path in enumerate(order)}
    return DraftTree(
        np.array([path[-1] for path in order], np.int32),
        np.array([place.get(path[:-1], -1) for path in order], np.int16),
        np.array([levels[path] for path in order], np.uint8),
    )


def _rank(path: Path, levels: Mapping[Path, int]) -> tuple[Any, ...]:
    """Return where a path stands in a tree: by level, depth, token, and then as its parent does."""
    return (levels[path], len(path), path[-1], _rank(path[:-1], levels)) if path else ()


class Adversary:
    """A drafter that is its own session and knows the text so far; those below say what they propose.

    Attributes:
        text: the text as it was told: prompt and all that was accepted.
        trees: how many drafts were asked for.
        off_first: accepted nodes that were not the first child of their parent in the order of the tree.
        moved: passes whose accepted rows were not the first rows, so that a cache must be compacted.
    """

    needs_candidates = False
    needs_hidden = False

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        self.vocab_size = vocab_size
        self.seed = seed
        self.random = np.random.default_rng(seed)
        self.text: list[int] = []
        self.prompt_size = 0
        self.trees = self.off_first = self.moved = 0

    def session(self, prompt_ids: ArrayLike, **_prefill: Any) -> "Adversary":
        self.text = np.asarray(prompt_ids).tolist()
        self.prompt_size = len(self.text)
        self.random = np.random.default_rng([self.seed, *self.text])
        return self

    def propose(self, budget: int = 64, min_prob: float = 0.0) -> DraftTree:
        self.trees += 1
        tree = tree_of(self.paths(budget))
        tree.validate()
        return tree

    def paths(self, budget: int) -> Mapping[Path, float] | Iterable[Path]:
        """Return the paths of a draft."""
        raise NotImplementedError

    def observe(
        self,
        accepted_ids: ArrayLike,
        *,
        tree: DraftTree | None = None,
        candidates: NDArray[np.int32] | None = None,
        hidden: NDArray[np.float32] | None = None,
    ) -> None:
        ids = np.asarray(accepted_ids).tolist()
        assert tree is not None
        path = tree.accepted(np.array(ids[:-1], np.int32))
        assert len(path) == len(ids) - 1, "all that was accepted but the last was drafted"
        self.off_first += sum(node != tree.parents.tolist().index(int(tree.parents[node])) for node in path)
        self.moved += path != list(range(len(path)))
        self.text += ids


class Silent(Adversary):
    """Proposes nothing."""

    def paths(self, budget: int) -> list[Path]:
        return []


class RandomTrees(Adversary):
    """Proposes trees of random shape and size, of a few of the ids or of all."""

    def paths(self, budget: int) -> list[Path]:
        count = self.random.integers(1, self.vocab_size + 1)
        ids = self.random.permutation(self.vocab_size)[:count].tolist()
        paths: list[Path] = [()]
        for _ in range(self.random.integers(0, budget + 1)):
            parent = paths[int(self.random.integers(0, len(paths)))]
            paths.append((*parent, int(self.random.choice(ids))))
        return list(dict.fromkeys(path for path in paths if path))


class Knowing(Adversary):
    """A drafter that was shown whole texts, prompt and output."""

    def __init__(self, vocab_size: int, texts: Iterable[Sequence[int]], seed: int = 0) -> None:
        super().__init__(vocab_size, seed)
        self.texts = [list(text) for text in texts]

    def ahead(self, count: int) -> Path:
        """Return what comes next.

        Raises:
            AssertionError: the text so far is no beginning of one that was shown.
        """
        size = len(self.text)
        for text in self.texts:
            if text[:size] == self.text:
                return tuple(text[size : size + count])
        raise AssertionError(f"no text that was shown begins like {self.text}")

    def other_than(self, token: int) -> int:
        """Return some other id."""
        return (token + 1 + int(self.random.integers(0, self.vocab_size - 1))) % self.vocab_size


class AlwaysWrong(Knowing):
    """Proposes what comes next with its first token changed: no node is ever right."""

    def paths(self, budget: int) -> list[Path]:
        truth = self.ahead(min(4, budget // 3))
        return [(self.other_than(truth[0]), *truth[1:]) for _ in range(3)] if truth else []


class EosInside(Knowing):
    """Proposes what comes next with the end of the text everywhere, and with more text behind every end."""

    def __init__(self, vocab_size: int, texts: Iterable[Sequence[int]], eos: int) -> None:
        super().__init__(vocab_size, texts)
        self.eos = eos

    def paths(self, budget: int) -> list[Path]:
        truth = self.ahead(4)
        ends = [(*truth[:size], self.eos) for size in range(len(truth) + 1)]
        return [truth, *((*end, *truth[:2], self.eos) for end in ends)]


class OverBudget(RandomTrees):
    """Proposes three times as much as it was asked for, and five nodes even if that was nothing."""

    def paths(self, budget: int) -> list[Path]:
        return super().paths(3 * budget) or [(token,) for token in range(min(5, self.vocab_size))]


class Prophet(Knowing):
    """Proposes what comes next, off the first branch, with errors at a given rate.

    At each step a decoy with a branch of its own stands before the true token: what is accepted is never the first
    child and never the first rows of a pass.
    """

    def __init__(
        self, vocab_size: int, texts: Iterable[Sequence[int]], error_rate: float = 0.0, depth: int = 6
    ) -> None:
        super().__init__(vocab_size, texts)
        self.error_rate = error_rate
        self.depth = depth

    def paths(self, budget: int) -> dict[Path, float]:
        paths: dict[Path, float] = {}
        path: Path = ()
        chance = 1.0
        for token in self.ahead(min(self.depth, budget // 3)):
            decoy = self.other_than(token)
            said = decoy if self.random.random() < self.error_rate else token
            paths |= {(*path, decoy): 0.95 * chance, (*path, decoy, token): 0.92 * chance}
            path, chance = (*path, said), 0.9 * chance
            paths.setdefault(path, chance)
        return paths


class Prophets:
    """A drafter with a prophet for each text, which believes all texts to go on behind their ends.

    Attributes:
        sessions: the prophets so far.
    """

    needs_candidates = False
    needs_hidden = False

    def __init__(
        self, vocab_size: int, texts: Iterable[Sequence[int]], error_rate: float = 0.0, depth: int = 6
    ) -> None:
        self.vocab_size = vocab_size
        self.texts = [[*text, *range(8)] for text in texts]
        self.error_rate, self.depth = error_rate, depth
        self.sessions: list[Prophet] = []

    def session(self, prompt_ids: ArrayLike, **prefill: Any) -> Adversary:
        self.sessions.append(Prophet(self.vocab_size, self.texts, self.error_rate, self.depth))
        return self.sessions[-1].session(prompt_ids, **prefill)
