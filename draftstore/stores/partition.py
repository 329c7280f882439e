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
    """One of several parts, written `3/16`.

    Attributes:
        number: which one, from 1.
        parts: how many there are.
    """

    number: int
    parts: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a partition.

        Raises:
            StoreError: it is none.
        """
        found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text.strip(), re.ASCII)
        if not found or not 1 <= int(found[1]) <= int(found[2]):
            raise StoreError(
                f"{text!r} is no partition: expected NUMBER/COUNT, such as 3/16, the third of sixteen"
            )
        return cls(int(found[1]), int(found[2]))

    def __str__(self) -> str:
        return f"{self.number}/{self.parts}"

    def of(self, sizes: NDArray[np.int64]) -> slice:
        """Return the neighbouring pieces of a partition, at least one, of about as many bytes or tokens as each other.

        Args:
            sizes: int64 [pieces], the size of each.

        Raises:
            StoreError: there are fewer pieces than partitions.
        """
        if len(sizes) < self.parts:
            raise StoreError(
                f"{len(sizes):,} segments for {self.parts:,} partitions: expected one for each at least"
            )
        ends = np.cumsum(sizes)
        middles = ends - sizes / 2
        cuts = np.searchsorted(middles, ends[-1] * np.arange(1, self.parts) / self.parts)
        first = np.arange(1, self.parts)
        cuts = np.maximum.accumulate(cuts - first) + first  # each after the one before, and
        cuts = np.minimum(
            np.maximum(cuts, first), len(sizes) - self.parts + first
        )  # room for those that follow
        bounds = [0, *cuts.tolist(), len(sizes)]
        return slice(bounds[self.number - 1], bounds[self.number])
