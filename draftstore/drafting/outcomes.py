"""The outcome of each source's own draft in a step, and the reason if a source drafted nothing.

    tree = session.propose(16)
    session.observe(new)
    counts += counted(labels, outcomes(session, tree, new))     after every step of a text

Reasons are `no_match`; `budget`, if no nodes were requested; `failed`, if the source was disabled for the text; for a
lookup service, the `Outcome` of the call: `skipped` in a pause after failures, `timeout`, `unreachable`, ...
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftstore.drafting.drafter import NO_MATCH, Session
from draftstore.drafting.mixture import MixtureSession
from draftstore.trees.tree import DraftTree


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


def outcomes(session: Session, tree: DraftTree, new: NDArray[np.int32]) -> list[SourceOutcome]:
    """Return the part of each source in the last step of a session, in order; empty if no nodes were requested.

    Args:
        session: after `observe`.
        tree: its last proposal.
        new: int32 [any], the ids that it observed.
    """
    if not isinstance(session, MixtureSession):
        return [_outcome(session, tree, len(tree.accepted(new)))]
    parts = zip(session.sessions, session.proposed, session.matched, strict=False)
    return [_outcome(*part) for part in parts]


def _outcome(session: Session, tree: DraftTree, matched: int) -> SourceOutcome:
    return SourceOutcome(len(tree), matched, "" if len(tree) else getattr(session, "reason", NO_MATCH))


def counted(labels: Sequence[str], parts: Sequence[SourceOutcome]) -> Counter[tuple[str, str]]:
    """Return a step's `drafted`, `matched` and reasons by source; without parts, no nodes were requested."""
    counts: Counter[tuple[str, str]] = Counter()
    for label, part in zip(
        labels, parts or [NOT_WANTED] * len(labels), strict=False
    ):  # none without a source
        counts[label, "drafted"] = part.drafted
        counts[label, "matched"] = part.matched
        if part.reason:
            counts[label, part.reason] = 1
    return counts
