"""The systems of `benchmarks.agents`: draftstore by source and with live memory, and libraries that learn online."""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from benchmarks.common import Documents, split_documents
from benchmarks.quality.libraries import Arctic, Ngram
from benchmarks.quality.ngram import new_corpus
from benchmarks.quality.systems import System, Texts, absent
from draftstore.decoding.replay import Recording
from draftstore.drafting.drafter import Drafter
from draftstore.drafting.mixture import Mixture
from draftstore.drafting.request import RequestDrafter
from draftstore.live.log import LiveDocument
from draftstore.live.memory import Memory, MemoryDrafter

Maker = Callable[[Texts, int], System]
"""Makes a system from texts, for drafts of so many nodes."""


class Live:
    """A live memory of replies, read by a drafter."""

    def __init__(self, vocab_size: int, strategy: str) -> None:
        self.drafter = MemoryDrafter(Memory(vocab_size), strategy)

    def learn(self, recording: Recording) -> None:
        """Append a reply, as a worker does at its end."""
        self.drafter.memory.append(LiveDocument.of(recording.prompt, recording.output).ids)

    def forget(self) -> None:
        """Start over."""
        self.drafter.memory = Memory(self.drafter.vocab_size)


def _ours(texts: Texts, _nodes: int, *, sources: Sequence[str]) -> System:
    """Mix draftstore's sources."""
    vocab_size = texts.workspace.tokenizer.vocab_size
    live = Live(vocab_size, "supplement" if "store" in sources else "sole")
    drafters: dict[str, Callable[[], Drafter]] = {
        "request": lambda: RequestDrafter(vocab_size),
        "live": lambda: live.drafter,
        "store": texts.store.drafter,
    }
    mixed = Mixture([drafters[source]() for source in sources])
    return System(mixed, learn=live.learn, forget=live.forget)


def _arctic(texts: Texts, _nodes: int, *, stored: bool) -> System:
    nothing = Documents(np.empty(0, np.int32), np.zeros(1, np.int64), 0)
    return System(Arctic(split_documents(texts.store.index) if stored else nothing))


def _sglang(texts: Texts, nodes: int) -> System:
    return System(Ngram(new_corpus(texts.store.index, nodes)), nodes=nodes)


BEFORE, ALL = "request and store", "request, store and live"
LIVE = "request and live"
SYSTEMS: dict[str, Maker] = {
    ALL: partial(_ours, sources=("request", "live", "store")),
    BEFORE: partial(_ours, sources=("request", "store")),
    LIVE: partial(_ours, sources=("request", "live")),
    "live": partial(_ours, sources=("live",)),
    "request": partial(_ours, sources=("request",)),
    "arctic-inference with store": partial(_arctic, stored=True),
    "arctic-inference": partial(_arctic, stored=False),
    "SGLang NGRAM": _sglang,
}


def installed() -> list[str]:
    """Return the systems whose libraries are installed."""
    missing = absent()
    return [name for name in SYSTEMS if not any(name.startswith(library) for library in missing)]
