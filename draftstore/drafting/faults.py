"""Sources of a mixture that fail: each is left out for the rest of its text, and counted; the others go on."""

import logging
from typing import Any

from draftstore.trees.tree import DraftTree

LOG = logging.getLogger(__name__)


class DisabledSession:
    """The session of a source that has failed: it proposes nothing."""

    needs_candidates = False
    needs_hidden = False

    def propose(self, budget: int = 64, min_prob: float = 0.0) -> DraftTree:  # noqa: ARG002
        """Return an empty draft."""
        return DraftTree.empty()

    def observe(self, accepted_ids: Any, **feedback: Any) -> None:
        """Learn nothing."""


class Faults:
    """How often the sources of a mixture have failed.

    Attributes:
        counts: texts that each source was left out of, by its place in the mixture.
    """

    def __init__(self, sources: int) -> None:
        """Count from nothing."""
        self.counts = [0] * sources

    def add(self, place: int, error: object) -> None:
        """Count a failure; the first, second, fourth, eighth ... of a source is logged."""
        self.counts[place] += 1
        count = self.counts[place]
        if count & (count - 1) == 0:
            LOG.warning("drafter %d of a mixture is left out of %d texts by now: %s", place + 1, count, error)
