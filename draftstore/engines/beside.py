"""Another drafter beside the store: at each step of a text, the chain of which more is expected.

    contest = Contest()
    contest.learn(keys, texts)                  every step: what became of both chains, whichever was verified
    ours = contest.choose(key, size, tree, chain)

Both chains are judged by each text's next tokens, so none has to be verified to be known. These tokens end where the
verified chain ended: what lies behind them is unknown, so chances are counted token by token, each after those before
it, and multiplied.
"""

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftstore.trees.tree import DraftTree

MEMORY = 0.999
"""What a count keeps with each chain that is counted: about the last thousand matter."""
DOUBT = 8.0
"""Number of tokens that an estimate needs to outweigh what is assumed without any."""
Floats = NDArray[np.float64]


def expected_length(chances: Floats) -> float:
    """Return the expected number of accepted tokens.

    Args:
        chances: float64 [n], of each token to be accepted if those before it are.
    """
    return float(np.cumprod(chances).sum())


def outcomes(tokens: Sequence[int], new: Sequence[int]) -> list[bool]:
    """Return what is known of a chain from the text's new tokens: whether each token was right, up to the first wrong.

    Args:
        tokens: the chain.
        new: what came, the last token being the model's own.
    """
    known = [token == came for token, came in zip(tokens, new, strict=False)]
    return known[: known.index(False) + 1] if False in known else known


class LengthChances:
    """Chances of the tokens of a drafter that gives no probabilities: by length of the chain, and place in it."""

    def __init__(self, longest: int) -> None:
        """Begin with even chances, for chains of at most `longest` tokens."""
        self._right = np.zeros((longest + 1, longest))
        self._tried = np.zeros((longest + 1, longest))

    def of(self, length: int) -> Floats:
        """Return float64 [length], the chance of each token after those before it."""
        overall = (self._right.sum(0) + 1.0) / (self._tried.sum(0) + 2.0)
        chances = (self._right[length] + DOUBT * overall) / (self._tried[length] + DOUBT)
        return np.asarray(chances[:length])

    def learn(self, length: int, known: Sequence[bool]) -> None:
        """Count the outcomes of a chain."""
        self._right[length] *= MEMORY
        self._tried[length] *= MEMORY
        self._right[length, : len(known)] += known
        self._tried[length, : len(known)] += 1.0


class Trust:
    """How far probabilities hold: tokens that were right, over those that should have been."""

    def __init__(self) -> None:
        """Begin with full trust."""
        self._right = self._predicted = 0.0

    def of(self, probs: Floats) -> Floats:
        """Return float64 [n], the chance of each token of a chain after those before it.

        Args:
            probs: float64 [n], probability of each token and all before it.
        """
        held = (self._right + DOUBT) / (self._predicted + DOUBT)
        return np.asarray(np.minimum(1.0, held * _conditional(probs)))

    def learn(self, probs: Floats, known: Sequence[bool]) -> None:
        """Count the outcomes of a chain."""
        self._right = MEMORY * self._right + sum(known)
        self._predicted = MEMORY * self._predicted + float(_conditional(probs)[: len(known)].sum())


def _conditional(probs: Floats) -> Floats:
    """Return the probability of each token after those before it."""
    return probs / np.concatenate(([1.0], probs[:-1]))


class _Asked(NamedTuple):
    """Both chains of a text at some size, with the probabilities of ours."""

    size: int
    ours: list[int]
    probs: Floats
    theirs: list[int]


class Contest:
    """Chooses between the store's chain and another drafter's."""

    def __init__(self, longest: int) -> None:
        """Begin without experience, for chains of at most `longest` tokens."""
        self._longest = longest
        self._trust, self._chances = Trust(), LengthChances(longest)
        self._asked: dict[Hashable, _Asked] = {}

    def learn(self, keys: Sequence[Hashable], texts: Sequence[NDArray[np.int32]]) -> int:
        """Learn what became of the last chains; return how many tokens of the other drafter came true.

        Args:
            keys: names of the texts of this step.
            texts: int32 [any] each, the texts as they are now.
        """
        asked, self._asked = self._asked, {}
        came_true = 0
        for key, ids in zip(keys, texts, strict=True):
            if (last := asked.get(key)) is not None and len(ids) > last.size:
                new = ids[last.size : last.size + self._longest + 1].tolist()
                if last.ours:
                    self._trust.learn(last.probs, outcomes(last.ours, new))
                if last.theirs:
                    known = outcomes(last.theirs, new)
                    self._chances.learn(len(last.theirs), known)
                    came_true += sum(known)
        return came_true

    def choose(self, key: Hashable, size: int, ours: DraftTree, theirs: list[int]) -> bool:
        """Return True if our chain is the better one; at equal terms it is.

        Args:
            key: name of the text.
            size: its length.
            ours: a chain.
            theirs: the other one, of any length; what is longer than the engine verifies is not counted.
        """
        theirs = theirs[: self._longest]
        probs = ours.probs.astype(np.float64)
        self._asked[key] = _Asked(size, ours.tokens.tolist(), probs, theirs)
        expected = expected_length(self._chances.of(len(theirs)))
        return expected_length(self._trust.of(probs)) >= expected
