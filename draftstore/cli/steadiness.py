"""Whether times measured on this machine mean something: its load before, and how much passes of equal cost differ."""

import dataclasses
import os
from collections.abc import Sequence

import numpy as np

from draftstore.decoding.curve import SPREAD


@dataclasses.dataclass(frozen=True)
class Steadiness:
    """How steady a machine was while times were taken.

    Attributes:
        load_average: processes that ran or waited in the minute before.
        cores: number of cores that this process may use.
        spread: how far the upper quartile of passes without drafts is above the lower, as a share of it.
    """

    load_average: float
    cores: int
    spread: float

    @classmethod
    def of(cls, load_average: float, times: Sequence[int]) -> "Steadiness":
        """Return the steadiness under a load of passes that took `times`; the load is that of `load_now` before."""
        low, high = np.percentile(np.array(times or [1]), (25, 75)).tolist()
        return cls(round(load_average, 2), len(os.sched_getaffinity(0)), round(high / max(low, 1) - 1, 3))

    @property
    def doubt(self) -> str:
        """A sentence that says why the times mean little; empty if they mean something."""
        if self.load_average <= self.cores and self.spread <= SPREAD:
            return ""
        return (
            f"these times mean little: the load was {self.load_average:.1f} on {self.cores} cores, and equal passes "
            f"differ by {100 * self.spread:.0f} %; repeat on an idle machine (M stays the same)"
        )


def load_now() -> float:
    """Return the load average of the last minute; call it before the work that is timed."""
    return os.getloadavg()[0]
