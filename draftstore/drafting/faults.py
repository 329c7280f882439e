"""Failures of a mixture's sources."""

import logging
from typing import Any

from draftstore.trees.frontier import BUDGET
from draftstore.trees.tree import DraftTree

LOG = logging.getLogger(__name__)


class DisabledSession:
    """A `Session` without drafts: for plain decoding, or in place of a source that has failed."""

    needs_candidates = False
    needs_hidden = False
    reason = "failed"

    def propose(self, budget: int = BUDGET, min_prob: float = 0.0) -> DraftTree:  # noqa: ARG002
        """Return the empty tree."""
        return DraftTree.empty()

    def observe(self, accepted_ids: Any, **feedback: Any) -> None:
        """Do nothing."""


class Faults:
    """Number of texts for which each source of a mixture was disabled, by its position."""

    def __init__(self, sources: int) -> None:
        self.counts = [0] * sources

    def add(self, place: int, error: object) -> None:
        """Count a failure; the first, second, fourth, eighth, ... of a source is logged."""
        self.counts[place] += 1
        count = self.counts[place]
        if count & (count - 1) == 0:
            LOG.warning("drafter %d of a mixture has been disabled for %d texts: %s", place + 1, count, error)
