"""The outcome of each source's own draft in a step, and the reason if a source drafted nothing.

    slots.observe(...)
    counts += counted(labels, slots.outcomes([slot]).of(0))     after every step of a text

Reasons are `no_match`; `budget`, if no nodes were requested; `failed`, if the source was disabled for the text; for a
lookup service, the `Outcome` of the call: `skipped` in a pause after failures, `timeout`, `unreachable`, ...
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

FAILED = "failed"


class SourceOutcome(NamedTuple):
    """One source's part of a step.

    Attributes:
        drafted: number of tokens in its own draft, verified or not.
        matched: number of these that became part of the text, verified or not.
        reason: why it drafted nothing; empty if it drafted.
    """

    drafted: int
    matched: int
    reason: str = ""


NOT_WANTED = SourceOutcome(0, 0, "budget")


def counted(labels: Sequence[str], parts: Sequence[SourceOutcome]) -> Counter[tuple[str, str]]:
    """Return a step's `drafted`, `matched` and reasons by source; without parts, no nodes were requested."""
    counts: Counter[tuple[str, str]] = Counter()
    # Plain decoding has no source.
    for label, part in zip(labels, parts or [NOT_WANTED] * len(labels), strict=False):
        counts[label, "drafted"] = part.drafted
        counts[label, "matched"] = part.matched
        if part.reason:
            counts[label, part.reason] = 1
    return counts
