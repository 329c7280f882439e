"""A drafter that proposes given drafts and records the calls that it gets."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from draftstore.trees.tree import DraftTree


class Feedback(NamedTuple):
    """The feedback of a pass to a session."""

    accepted: Any
    tree: DraftTree | None
    candidates: NDArray[np.int32] | None
    hidden: NDArray[np.floating[Any]] | None


class Scripted:
    """A drafter and its own session: it proposes given trees in turn, the last one again and again.

    Attributes:
        prefill: prompt, hidden state and candidates of each text.
        requests: budget and minimum probability of each proposal.
        feedback: what each pass reported.
    """

    def __init__(self, *trees: DraftTree, candidates: bool = False, hidden: bool = False) -> None:
        self.trees = trees
        self.needs_candidates = candidates
        self.needs_hidden = hidden
        self.prefill: list[tuple[Any, Any, Any]] = []
        self.requests: list[tuple[int, float]] = []
        self.feedback: list[Feedback] = []

    def session(
        self,
        prompt_ids: ArrayLike,
        *,
        hidden: NDArray[np.floating[Any]] | None = None,
        candidates: NDArray[np.int32] | None = None,
    ) -> "Scripted":
        self.prefill.append((prompt_ids, hidden, candidates))
        return self

    def propose(self, budget: int = 64, min_prob: float = 0.0) -> DraftTree:
        self.requests.append((budget, min_prob))
        return self.trees[min(len(self.requests), len(self.trees)) - 1]

    def observe(
        self,
        accepted_ids: ArrayLike,
        *,
        tree: DraftTree | None = None,
        candidates: NDArray[np.int32] | None = None,
        hidden: NDArray[np.floating[Any]] | None = None,
    ) -> None:
        self.feedback.append(Feedback(accepted_ids, tree, candidates, hidden))

    @property
    def accepted(self) -> list[list[int]]:
        """The tokens of each pass."""
        return [np.asarray(each.accepted).tolist() for each in self.feedback]


class Broken(Scripted):
    """Cannot propose."""

    def propose(self, budget: int = 64, min_prob: float = 0.0) -> DraftTree:
        raise OSError("gone")
