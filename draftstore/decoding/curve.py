"""The cost of a forward pass by its texts and their rows: measured on one device, stored as JSON, interpolated."""

import dataclasses
import datetime
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftstore.errors import CurveError
from draftstore.storage.files import write_json

FORMAT = 2
KIND = "cost curve"
CONTEXT, REPEATS, SPREAD, BATCHES = 512, 9, 0.2, (1, 8, 32)
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
class Costs:
    """Seconds of passes over a number of texts together, by the rows of each.

    Attributes:
        texts: number of texts.
        rows: numbers of rows of each text, ascending, from 1.
        seconds: seconds for each; if more rows were measured as faster, both get the mean.
    """

    texts: int
    rows: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        """Make the seconds monotone; CurveError if values are invalid."""
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

    @property
    def most(self) -> int:
        """The most rows that were measured, of all texts together."""
        return self.texts * self.rows[-1]

    def over(self, total: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return float64 [any], the seconds with so many rows of all texts; after the last, by its slope."""
        rows, seconds = self.rows, self.seconds
        slope = (seconds[-1] - seconds[-2]) / (rows[-1] - rows[-2]) if len(rows) > 1 else 0.0
        further = slope / self.texts * np.maximum(0, total - self.most)
        return np.interp(total, [self.texts * each for each in rows], seconds) + further


@dataclasses.dataclass(frozen=True)
class CostCurve:
    """Seconds of a forward pass by number of rows: 1 for plain decoding, k + 1 for a draft of k nodes.

    Attributes:
        rows: numbers of rows of one text, ascending, from 1.
        seconds: seconds for each; if more rows were measured as faster, both get the mean.
        padded: whether a pass is padded to the next number in `rows`, and to a power of two of texts, as with CUDA
            graphs; else costs are interpolated.
        conditions: those of the measurement, with tokens in the cache and time, ISO 8601; None for a synthetic curve.
        batches: costs of passes over several texts, by ascending numbers of texts.
    """

    rows: tuple[int, ...]
    seconds: tuple[float, ...]
    padded: bool = False
    conditions: Conditions | None = None
    context: int = 0
    created: str = ""
    batches: tuple[Costs, ...] = ()

    def __post_init__(self) -> None:
        """Make the values monotone; CurveError if they are invalid."""
        single, batches = Costs(1, self.rows, self.seconds), tuple(self.batches)
        texts = [each.texts for each in (single, *batches)]
        if texts != sorted(set(texts)):
            raise CurveError(f"cost curves of {texts} texts: expected ascending numbers of texts, from 1")
        object.__setattr__(self, "rows", single.rows)
        object.__setattr__(self, "seconds", single.seconds)
        object.__setattr__(self, "batches", batches)

    def every(self) -> tuple[Costs, ...]:
        """Return the costs of one text, then those of batches."""
        return (Costs(1, self.rows, self.seconds), *self.batches)

    def cost(self, n_rows: int, texts: int = 1) -> float:
        """Return the seconds of a pass over `n_rows` rows of each text; see `costs`."""
        return float(self.costs(texts, n_rows)[-1])

    def costs(self, texts: int, most: int) -> NDArray[np.float64]:
        """Return float64 [most], the seconds of passes over several texts together, with 1, 2, ... rows for each.

        The time depends on the rows of all texts together, above all, since a pass reads the weights once. So that of
        other numbers of texts lies between those of the two measured numbers beside, with as many rows in total; that
        of more texts is that of the most measured. Costs fall neither with rows nor with texts.
        """
        known, sizes = self.every(), list(range(1, most + 1))
        if self.padded:
            sizes = [next((size for size in self.rows if size >= rows), rows) for rows in sizes]
            texts = 1 << (texts - 1).bit_length()
        rows, place = np.array(sizes), sum(each.texts <= texts for each in known) - 1
        measured = [self._over(i, each.texts * rows) for i, each in enumerate(known)]
        least = np.max(measured[: place + 1], axis=0)
        found = self._over(place, texts * rows)
        if place + 1 < len(known):
            fewer, more = known[place].texts, known[place + 1].texts
            counts = np.arange(fewer, texts + 1)[:, None]
            share, total = (counts - fewer) / (more - fewer), counts * rows
            between = (1 - share) * self._over(place, total) + share * self._over(place + 1, total)
            found = np.minimum(between.max(axis=0), measured[place + 1])
        return np.where(found > least, found, least)

    def _over(self, place: int, total: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the seconds of a measured number of texts with so many rows; after its last, it grows as the next."""
        costs = self.every()[place]
        if place == len(self.batches):
            return costs.over(total)
        later = self._over(place + 1, np.append(np.maximum(total, costs.most), costs.most))
        further: NDArray[np.float64] = (later[:-1] - later[-1]).reshape(total.shape)
        return costs.over(np.minimum(total, costs.most)) + further

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
            kind, version = found["kind"], found["format"]
            curve = cls._of(found) if (kind, version) == (KIND, FORMAT) else None
        except OSError as error:
            raise CurveError(f"no cost curve at {path} ({error.strerror}): {advice}") from None
        except (CurveError, KeyError, TypeError, ValueError) as error:
            raise CurveError(
                f"{path} is not a cost curve ({type(error).__name__}: {error}): {advice}"
            ) from None
        if curve is None:
            raise CurveError(
                f"{path} is a {kind} of version {version}, expected a {KIND} of version {FORMAT}: {advice}"
            )
        return curve

    @classmethod
    def _of(cls, found: dict[str, Any]) -> "CostCurve":
        values = {field.name: found[field.name] for field in dataclasses.fields(cls)}
        values["batches"] = [Costs(**each) for each in values["batches"]]
        if values["conditions"] is not None:
            values["conditions"] = Conditions(**values["conditions"])
        return cls(**values)

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
