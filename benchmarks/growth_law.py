"""Laws of accepted length by tokens of text, fitted to a few samples, and what they say beyond them.

    logarithm   M = a + b log10(tokens)
    power       M = 1 + c tokens^k, which is a line of log10(M - 1)

The range beyond the samples reaches over both, with the 95 % interval that a further observation of a line has, if
errors are normal and the law goes on. The second is what nobody can know.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from draftstore.sizing import Law

FAR = 1e10
"""Tokens at which the laws are asked."""
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365)
"""97.5 % quantiles of Student's t, from one degree of freedom."""


def fit_law(tokens: Sequence[float], lengths: Sequence[float]) -> Law:
    """Fit both laws by least squares.

    Args:
        tokens: sizes of 3 to 9 samples.
        lengths: accepted length of each, above 1.
    """
    x, y = np.log10(tokens), np.asarray(lengths, float)
    slope, offset = np.polyfit(x, y, 1)
    exponent, factor = np.polyfit(x, np.log10(y - 1), 1)
    spread = float(np.sqrt(((y - offset - slope * x) ** 2).sum() / (len(x) - 2)))
    error = STUDENT[len(x) - 3] * spread
    mean, weight = float(x.mean()), float(((x - x.mean()) ** 2).sum())
    offset, slope, factor, exponent, error, mean, weight = (
        float(f"{number:.5g}") for number in (offset, slope, 10**factor, exponent, error, mean, weight)
    )
    return Law(offset, slope, factor, exponent, error, mean, weight, len(x), float(max(tokens)))


def fit_laws(tokens: Sequence[float], lengths: Sequence[float], far: float = FAR) -> dict[str, Any]:
    """Fit both laws, and say how well they do.

    Args:
        tokens: sizes of the samples, ascending; at least three.
        lengths: accepted length of each, above 1.
        far: tokens to ask the laws about.

    Returns:
        `law`; `rms`, the errors of both over the samples; `far`, the least, likely and most accepted length there; and
        `held_out`: the largest sample's length, and what laws say that have seen only the others, if those are three.
    """
    law = fit_law(tokens, lengths)
    x, y = np.asarray(tokens, float), np.asarray(lengths, float)
    rms = {
        name: round(float(np.sqrt(np.mean((said - y) ** 2))), 4)
        for name, said in (("log", _plain(law, x)), ("power", _power(law, x)))
    }
    answer = {"law": law._asdict(), "rms": rms, "far": [round(each, 3) for each in law.at(far)]}
    if len(x) > 3:
        before = fit_law(tokens[:-1], lengths[:-1])
        said = {"log": _plain(before, x[-1]), "power": _power(before, x[-1]), "measured": y[-1]}
        answer["held_out"] = {name: round(float(value), 4) for name, value in said.items()}
    return answer


def _plain(law: Law, tokens: Any) -> Any:
    return law.offset + law.slope * np.log10(tokens)


def _power(law: Law, tokens: Any) -> Any:
    return 1 + law.factor * tokens**law.exponent
