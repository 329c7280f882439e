"""A model without weights whose states tests can compute, for builds of dense stores."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftstore.stores.dresd.projection import Projection


class HashedStates:
    """States that are random, but the same for the same tokens so far.

    Attributes:
        name: of the model.
        vocab_size: ids that it takes.
        hidden_size: numbers of a state.
        positions: most tokens that it reads at once.
        read: the lengths of all texts read so far.
        broken: a token at which states are NaN.
    """

    def __init__(
        self,
        hidden_size: int = 12,
        vocab_size: int = 1 << 31,
        positions: int | None = None,
        broken: int = -1,
        name: str = "hashed",
    ) -> None:
        self.name = name
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.positions = positions
        self.broken = broken
        self.read: list[int] = []
        self._known: dict[int, NDArray[np.float64]] = {}

    def identity(self) -> dict[str, str]:
        return {"dtype": "float32", "weights": f"{self.hidden_size} {self.broken}"}

    def states(
        self, texts: Sequence[NDArray[Any]], projection: Projection | None = None
    ) -> Iterator[tuple[int, NDArray[np.float32]]]:
        for index in sorted(range(len(texts)), key=lambda i: -len(texts[i])):
            self.read.append(len(texts[index]))
            states = self.of(texts[index].tolist())
            yield index, states if projection is None else projection.apply(states)

    def of(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """Return float32 [tokens, hidden_size] of one text: sums of what the last tokens stand for, by distance."""
        rows = np.zeros((len(ids), self.hidden_size), np.float32)
        for token in set(ids) - self._known.keys():
            self._known[token] = np.random.default_rng(token + 1).standard_normal(self.hidden_size)
        total, before = np.ones(self.hidden_size), np.arange(self.hidden_size) - 1
        scale = np.arange(1, self.hidden_size + 1)
        for place, token in enumerate(ids):
            total = 0.7 * total[before] + self._known[token]
            rows[place] = np.nan if token == self.broken else total * scale
        return rows
