"""A partition of a store: which of so many equal parts one machine serves."""

import re
from collections.abc import Mapping
from typing import NamedTuple, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from draftstore.errors import StoreError

Extents: TypeAlias = Mapping[str, tuple[int, int]]
"""Bytes, from and to, of files that are read in part, by name; others are read whole."""


class Partition(NamedTuple):
    """One of several parts, written `3/16`: its number, from 1, and how many parts there are."""

    number: int
    parts: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a partition.

        Raises:
            StoreError: the text is not one.
        """
        found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text.strip(), re.ASCII)
        if not found or not 1 <= int(found[1]) <= int(found[2]):
            raise StoreError(
                f"{text!r} is not a partition: expected NUMBER/COUNT, such as 3/16, the third of sixteen"
            )
        return cls(int(found[1]), int(found[2]))

    def __str__(self) -> str:
        return f"{self.number}/{self.parts}"

    def of(self, sizes: NDArray[np.int64]) -> slice:
        """Return this partition's neighbouring pieces, about its share of all `sizes`, int64 [pieces]; at least one."""
        if len(sizes) < self.parts:
            raise StoreError(
                f"{len(sizes):,} segments for {self.parts:,} partitions: expected one for each at least"
            )
        ends = np.cumsum(sizes)
        middles = ends - sizes / 2
        cuts = np.searchsorted(middles, ends[-1] * np.arange(1, self.parts) / self.parts)
        first = np.arange(1, self.parts)
        # each after the one before, with room for those that follow
        cuts = np.maximum.accumulate(cuts - first) + first
        cuts = np.clip(cuts, first, len(sizes) - self.parts + first)
        bounds = [0, *cuts.tolist(), len(sizes)]
        return slice(bounds[self.number - 1], bounds[self.number])
