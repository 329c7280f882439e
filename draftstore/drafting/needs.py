"""The hidden states that several drafters need: in one space, or in several."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from draftstore.drafting.drafter import Drafter, Session, projection_of
from draftstore.drafting.projection import Projection


class HiddenNeeds:
    """The hidden states that the parts of a mixture (drafters or sessions) need.

    Attributes:
        any: whether a part is known to need them.
        projection: common projection of all these parts; None if they differ, or one needs unprojected states.
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
        """Return True if a state has the expected size."""
        if self.projection is not None:
            return hidden.shape == (self.projection.dims,)
        return all(own is None or hidden.shape == (own.hidden_size,) for own in self._own)

    def for_parts(self, hidden: NDArray[np.float32] | None) -> list[NDArray[np.float32] | None]:
        """Return the state for each part, from float32 [d], projected if there is a common projection."""
        if hidden is None:
            return [None] * len(self._own)
        if self.projection is not None:  # ignored by parts without one
            return [None if own is None else hidden for own in self._own]
        return [hidden if own is None else own.apply(hidden) for own in self._own]
