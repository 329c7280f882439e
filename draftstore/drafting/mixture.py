"""A mixture of several drafters: their trees for a step are merged into one, see `draftstore.drafting.merging`.

    drafter = Mixture([RequestDrafter(vocab_size), store.drafter(), RecyclingDrafter(vocab_size)])

A drafter that fails costs its own drafts of a text, never the text.
"""

from collections.abc import Sequence
from typing import Any

from numpy.typing import ArrayLike

from draftstore.drafting.drafter import Drafter
from draftstore.drafting.plans import Faults
from draftstore.drafting.request import RequestDrafter
from draftstore.drafting.slots import SlotDrafter, Slots
from draftstore.drafting.sources import check_trees
from draftstore.errors import DraftstoreError
from draftstore.trees.batch import DraftBatch


class Mixture(SlotDrafter):
    """A `Drafter` that combines several drafters; with a single one, it is equivalent to that one.

    Attributes:
        faults: how often each drafter was disabled.
    """

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        """Mix one or more drafters of any kind; their order affects only rounding."""
        if not drafters:
            raise DraftstoreError("a mixture needs at least one drafter")
        self.drafters = tuple(drafters)
        self.faults = Faults(len(self.drafters))

    @property
    def needs_candidates(self) -> bool:
        """Whether a drafter is known to need candidates."""
        return any(getattr(drafter, "needs_candidates", False) for drafter in self.drafters)

    def join(self, slots: Slots, prompt_ids: ArrayLike, **prefill: Any) -> int:
        """Start the drafts of one text; DraftstoreError if a drafter rejects it, as one for another model does."""
        faults = self.faults if len(self.drafters) > 1 else None
        return slots.join(self.drafters, prompt_ids, faults=faults, **prefill)

    def warm_up(self) -> None:
        """Compile the kernels, or load them from numba's cache, before the first draft; not the drafters' own."""
        session = Mixture([RequestDrafter(2), RequestDrafter(2)]).session([0, 0])
        session.propose(1)
        session.observe([0])
        check_trees(DraftBatch.empty(1), 1)
