"""A drafter assembled from named sources: stores, a release of the lookup service, live memory, the request, recycling.

    sources = Sources(stores=(Path("stores/chat"),), request=True)
    with assemble(sources, vocab_size=32_000, tokenizer=identity) as drafter:
        session = drafter.session(prompt_ids)

Stores and releases are checked against the model's tokenizer, and all kernels are compiled, before the first draft.
"""

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from draftstore.assembly.parts import GRAMMAR, LIVE, RECALL, REQUEST, Part, TargetModel, open_parts
from draftstore.assembly.sources import Sources
from draftstore.decoding.grammars import Grammar, GrammarDrafter
from draftstore.drafting.drafter import separated
from draftstore.drafting.mixture import Mixture
from draftstore.drafting.request import RequestDrafter
from draftstore.drafting.slots import SlotDrafter, Slots, start
from draftstore.live.log import LiveDocument
from draftstore.storage.manifest import TokenizerIdentity

LOG = logging.getLogger(__name__)


class Assembly(SlotDrafter, AbstractContextManager["Assembly"]):
    """A `Drafter` composed of several; it owns the resources opened for it.

    Attributes:
        parts: its drafters; may be empty.
        vocab_size: size of the model's vocabulary; texts are `separated` at other ids.
        drafter: the only drafter, or a mixture of several; None if there are none.
    """

    def __init__(self, parts: Sequence[Part], vocab_size: int, opened: ExitStack) -> None:
        """Mix `parts`; their resources are closed with `opened`."""
        self.parts, self.vocab_size = tuple(parts), vocab_size
        drafters = [part.drafter for part in parts]
        self.drafter = Mixture(drafters) if len(drafters) > 1 else next(iter(drafters), None)
        self._opened = opened
        self._appends = [part.append for part in parts if part.append is not None]

    def remember(
        self,
        prompt: NDArray[np.integer[Any]],
        output: ArrayLike,
        digest: bytes = b"",
        prompt_size: int | None = None,
    ) -> None:
        """Append a finished answer to the live store, if there is one. Never raises.

        Args:
            prompt: int32 [any], all before the answer.
            output: int32 [any], the answer, or its last part.
            digest: 16 bytes that identify the document (`draftstore.text.digests`); empty: unknown.
            prompt_size: number of ids of the prompt, if it is followed by the beginning of the answer.
        """
        for append in self._appends:
            try:
                known = separated(prompt, self.vocab_size)
                whole = LiveDocument.of(known, separated(output, self.vocab_size), digest, asked=prompt_size)
                start = 1 + max(np.flatnonzero(whole.ids < 0).tolist(), default=-1)  # what follows an image
                append(whole._replace(ids=whole.ids[start:], prompt_size=max(0, whole.prompt_size - start)))
            except Exception as error:  # noqa: BLE001 (the answer is complete; only later drafts suffer)
                LOG.warning("could not remember an answer: %s", error)

    def without_live(self) -> "Assembly":
        """Return the same drafters without the live store, for texts that opt out; closing the result does nothing."""
        others = [part for part in self.parts if part.kind not in (LIVE, RECALL)]
        return Assembly(others, self.vocab_size, ExitStack())

    @property
    def labels(self) -> list[str]:
        """The labels of its parts, in order."""
        return [part.label for part in self.parts]

    @property
    def needs_candidates(self) -> bool:
        """Whether any drafter needs the candidates of a prompt; see `Drafter.session`."""
        return bool(getattr(self.drafter, "needs_candidates", False))

    def join(self, slots: Slots, prompt_ids: ArrayLike, **prefill: Any) -> int:
        """Start the drafts of one text; see `Drafter.session`. Returns its slot."""
        return start(self.drafter, separated(prompt_ids, self.vocab_size), slots=slots, **prefill).slot

    def predicting(self, prediction: ArrayLike) -> "Assembly":
        """Return the same drafters for an answer with a prediction, which becomes another source of drafts.

        Args:
            prediction: int32 [any], the expected continuation of the prompt.
        """
        expected = separated(prediction, self.vocab_size)
        drafter = RequestDrafter(self.vocab_size, prediction=expected)
        return self._with(Part(REQUEST, "the request itself", drafter))

    def following(self, grammar: Grammar, prompt_size: int) -> "Assembly":
        """Return the same drafters for an answer that follows a grammar after `prompt_size` tokens."""
        return self._with(Part(GRAMMAR, "the grammar", GrammarDrafter(grammar, prompt_size)))

    def _with(self, part: Part) -> "Assembly":
        """Return the same drafters with `part` replacing any of its kind; closing the result does nothing."""
        others = [other for other in self.parts if other.kind != part.kind]
        return Assembly([part, *others], self.vocab_size, ExitStack())

    def close(self) -> None:
        """Close stores and connections; no more drafts may be made."""
        self._opened.close()

    def __exit__(self, *_error: object) -> None:
        self.close()


def assemble(
    sources: Sources,
    *,
    vocab_size: int,
    tokenizer: TokenizerIdentity,
    model: str | None = None,
    hidden_size: int | None = None,
) -> Assembly:
    """Open all sources.

    Args:
        sources: sources named by the user.
        vocab_size: size of the model's vocabulary.
        tokenizer: tokenizer of the model.
        model: name of the model; stores of another model's candidates or hidden states are refused. None accepts any.
        hidden_size: size of its hidden states; dense stores of another size are refused. None accepts any.

    Raises:
        StoreError: a store cannot be opened, or belongs to another model.
        TokenizerError: a store was built with another tokenizer.
        LookupServiceError: the service is down or refuses the release.
        DraftstoreError: inconsistent settings.
    """
    with ExitStack() as opened:
        parts = open_parts(sources, TargetModel(vocab_size, tokenizer, model, hidden_size), opened)
        assembly = Assembly(parts, vocab_size, opened.pop_all())
    _warm_up(assembly)
    return assembly


def _warm_up(assembly: Assembly) -> None:
    """Compile every kernel so that the first text need not wait."""
    for drafter in (*(part.drafter for part in assembly.parts), assembly.drafter):
        warm_up = getattr(drafter, "warm_up", None)
        if warm_up is not None:
            warm_up()
