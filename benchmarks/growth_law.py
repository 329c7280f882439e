"""Laws of accepted length by tokens of text, fitted to a few samples, and what they say beyond them.

    logarithm   M = a + b log10(tokens)
    power       M = 1 + c tokens^k, which is a line of log10(M - 1)

The range beyond the samples is that of a further observation of either law with 95 % probability, if errors are normal
and the law goes on: the second is what nobody can know.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

FAR = 1e10
"""Tokens at which the laws are asked."""
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365)
"""97.5 % quantiles of Student's t, from one degree of freedom."""


class Line(NamedTuple):
    """A line fitted by least squares.

    Attributes:
        offset: where it begins.
        slope: its slope.
        spread: standard deviation of the errors.
        mean: of x.
        weight: sum of squared distances of x from the mean.
        count: points.
    """

    offset: float
    slope: float
    spread: float
    mean: float
    weight: float
    count: int

    def at(self, x: float) -> float:
        """Return y."""
        return self.offset + self.slope * x

    def margin(self, x: float) -> float:
        """Return by how much a further observation may differ, with 95 % probability."""
        grown = 1 + 1 / self.count + (x - self.mean) ** 2 / self.weight
        return STUDENT[self.count - 3] * self.spread * grown**0.5


def fit_line(x: Sequence[float], y: Sequence[float]) -> Line:
    """Fit a line to 3 to 9 points."""
    mean = float(np.mean(x))
    slope, offset = np.polyfit(x, y, 1)
    errors = np.asarray(y) - (offset + slope * np.asarray(x))
    spread = float(np.sqrt((errors**2).sum() / (len(x) - 2)))
    weight = float(((np.asarray(x) - mean) ** 2).sum())
    return Line(float(offset), float(slope), spread, mean, weight, len(x))


def fit_laws(tokens: Sequence[float], lengths: Sequence[float], far: float = FAR) -> dict[str, Any]:
    """Fit both laws.

    Args:
        tokens: sizes of the samples, ascending; at least three.
        lengths: accepted length of each, above 1.
        far: tokens to ask the laws about.

    Returns:
        For each law its numbers, root mean square error over the samples and answer at `far`; the range of both there;
        and what they say of the largest sample when they have seen only the others, if those are three or more.
    """
    x, y = np.log10(tokens), np.asarray(lengths, float)
    end = float(np.log10(far))
    plain, power = fit_line(x.tolist(), y.tolist()), fit_line(x.tolist(), np.log10(y - 1).tolist())
    found = {
        "log": {"offset": plain.offset, "slope": plain.slope, "rms": _rms(y - _plain(plain, x)), "at": plain.at(end)},
        "power": {
            "factor": 10**power.offset, "exponent": power.slope, "rms": _rms(y - _power(power, x)),
            "at": float(_power(power, end)),
        },
    }  # fmt: skip
    margins = [plain.margin(end), power.margin(end)]
    lows = (plain.at(end) - margins[0], 1 + 10 ** (power.at(end) - margins[1]))
    highs = (plain.at(end) + margins[0], 1 + 10 ** (power.at(end) + margins[1]))
    answer: dict[str, Any] = _rounded(found) | {"range": [round(max(1.0, min(lows)), 3), round(max(highs), 3)]}
    if len(x) > 3:
        before = fit_line(x[:-1].tolist(), y[:-1].tolist()), fit_line(x[:-1].tolist(), np.log10(y[:-1] - 1).tolist())
        said = {"log": _plain(before[0], x[-1]), "power": _power(before[1], x[-1]), "measured": y[-1]}
        answer["held_out"] = {name: round(float(value), 4) for name, value in said.items()}
    return answer


def _plain(line: Line, x: Any) -> Any:
    return line.offset + line.slope * x


def _power(line: Line, x: Any) -> Any:
    return 1 + 10 ** (line.offset + line.slope * x)


def _rms(errors: Any) -> float:
    return float(np.sqrt(np.mean(errors**2)))


def _rounded(laws: dict[str, dict[str, float]]) -> dict[str, Any]:
    return {law: {name: float(f"{value:.5g}") for name, value in own.items()} for law, own in laws.items()}
