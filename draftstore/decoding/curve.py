"""The cost of a forward pass by its number of rows: measured on one device, stored as JSON, interpolated."""

import dataclasses
import datetime
import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from draftstore.errors import CurveError
from draftstore.storage.files import write_json

FORMAT = 1
KIND = "cost curve"
CONTEXT, REPEATS, SPREAD = 512, 9, 0.2
"""Defaults of a measurement (`draftstore.hf.tuning.measure`)."""


@dataclasses.dataclass(frozen=True)
class Conditions:
    """The conditions under which a cost curve was measured.

    `shape` is a hash of the model's type and its parameters' shapes and types; `threads` are 0 if they do not matter.
    """

    model: str
    shape: str
    device: str
    dtype: str
    attention: str
    threads: int

    def differences(self, other: "Conditions") -> list[str]:
        """Describe the differences to other conditions, except for the model's name."""
        mine, others = dataclasses.asdict(self), dataclasses.asdict(other)
        return [
            f"{name} {mine[name]!r}, found {others[name]!r}"
            for name in mine
            if name != "model" and mine[name] != others[name]
        ]


@dataclasses.dataclass(frozen=True)
class CostCurve:
    """Seconds of a forward pass by number of rows: 1 for plain decoding, k + 1 for a draft of k nodes.

    Attributes:
        rows: numbers of rows, ascending, from 1.
        seconds: seconds for each; if more rows were measured as faster, both get the mean.
        padded: whether a pass is padded to the next number in `rows`, as with CUDA graphs; else costs are interpolated.
        conditions: those of the measurement, with tokens in the cache and time, ISO 8601; None for a synthetic curve.
    """

    rows: tuple[int, ...]
    seconds: tuple[float, ...]
    padded: bool = False
    conditions: Conditions | None = None
    context: int = 0
    created: str = ""

    def __post_init__(self) -> None:
        """Make the values monotone; CurveError if they are invalid."""
        rows, seconds = [int(each) for each in self.rows], [float(each) for each in self.seconds]
        if len(rows) != len(seconds) or rows[:1] != [1] or rows != sorted(set(rows)):
            raise CurveError(
                f"a cost curve over the rows {rows} with {len(seconds)} times: expected ascending numbers of rows "
                "starting with 1, and a time for each"
            )
        wrong = [each for each in seconds if not (math.isfinite(each) and each > 0)]
        if wrong:
            raise CurveError(f"a forward pass of {wrong[0]} seconds: expected a positive number")
        object.__setattr__(self, "rows", tuple(rows))
        object.__setattr__(self, "seconds", tuple(_ascending(seconds)))

    def cost(self, n_rows: int) -> float:
        """Return the seconds of a pass over `n_rows` rows; extrapolated with the last slope."""
        rows, seconds = self.rows, self.seconds
        if n_rows > rows[-1]:
            slope = (seconds[-1] - seconds[-2]) / (rows[-1] - rows[-2]) if len(rows) > 1 else 0.0
            return seconds[-1] + slope * (n_rows - rows[-1])
        if self.padded:
            return seconds[int(np.searchsorted(rows, n_rows))]
        return float(np.interp(n_rows, rows, seconds))

    def costs(self, texts: int, most: int) -> NDArray[np.float64]:
        """Return float64 [most], the seconds of passes over several texts together, with 1, 2, ... rows for each.

        Such a pass costs as much as one over the same number of rows of one text, apart from attention: it reads the
        weights once.
        """
        counts: Sequence[int] = range(1, most + 1)
        if texts == 1:
            return np.array([self.cost(rows) for rows in counts])
        if self.padded:
            counts = [next((size for size in self.rows if size >= rows), rows) for rows in counts]
        alike = dataclasses.replace(self, padded=False)
        return np.array([alike.cost(texts * rows) for rows in counts])

    def save(self, path: Path) -> None:
        """Write the curve as JSON, atomically."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"format": FORMAT, "kind": KIND, **dataclasses.asdict(self)})

    @classmethod
    def load(cls, path: Path) -> "CostCurve":
        """Read a curve; CurveError if there is none, or its format is another version."""
        advice = "measure it again with `draftstore tune`"
        try:
            found = json.loads(path.read_bytes())
            values = {field.name: found[field.name] for field in dataclasses.fields(cls)}
            if values["conditions"] is not None:
                values["conditions"] = Conditions(**values["conditions"])
            curve = cls(**values)
        except OSError as error:
            raise CurveError(f"no cost curve at {path} ({error.strerror}): {advice}") from None
        except (CurveError, KeyError, TypeError, ValueError) as error:
            raise CurveError(
                f"{path} is not a cost curve ({type(error).__name__}: {error}): {advice}"
            ) from None
        kind, version = found.get("kind"), found.get("format")
        if (kind, version) != (KIND, FORMAT):
            raise CurveError(
                f"{path} is a {kind} of version {version}, expected a {KIND} of version {FORMAT}: {advice}"
            )
        return curve

    def require(self, conditions: Conditions) -> "CostCurve":
        """Return the curve; CurveError unless it was measured under the given conditions."""
        differences = self.conditions.differences(conditions) if self.conditions else []
        if differences:
            raise CurveError(
                f"the cost curve was measured with {' and '.join(differences)}: "
                f"run `draftstore tune --model {conditions.model}` for this one"
            )
        return self


def now() -> str:
    """Return the current time, for `created`."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _ascending(values: Sequence[float]) -> list[float]:
    """Return the nearest ascending sequence in least squares (pool adjacent violators, Ayer et al., 1955)."""
    pools: list[tuple[float, int]] = []
    for each in values:
        pool = (each, 1)
        while pools and pools[-1][0] > pool[0]:
            mean, size = pools.pop()
            total = size + pool[1]
            pool = ((mean * size + pool[0] * pool[1]) / total, total)
        pools.append(pool)
    return [mean for mean, size in pools for _ in range(size)]
