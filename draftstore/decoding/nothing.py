"""The session for decoding without drafts."""

from typing import Any

from draftstore.trees.tree import DraftTree


class NoDrafts:
    """A `Session` without drafts."""

    needs_candidates = False
    needs_hidden = False

    def propose(self, budget: int = 64, min_prob: float = 0.0) -> DraftTree:  # noqa: ARG002
        """Return the empty tree."""
        return DraftTree.empty()

    def observe(self, accepted_ids: Any, **_feedback: Any) -> None:
        """Do nothing."""
