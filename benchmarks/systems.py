"""What is compared in `benchmarks.quality`: draftstore by source, published methods in draftstore, other libraries."""

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks import peers
from benchmarks.asked import Arctic, Ngram, PromptLookup
from benchmarks.common import Source, Workspace
from benchmarks.curve_points import AUTHORS_TOKEN_BYTES
from benchmarks.measure import resident
from benchmarks.ngram import new_corpus
from benchmarks.peerprobe import split_documents
from draftstore.assembly import Sources, assemble
from draftstore.drafting.drafter import Drafter
from draftstore.stores.crest.build import CrestOptions, build_crest
from draftstore.stores.rest.store import RestStore

PART_OF_REST = 13.5
"""CREST's paper compares its store with one of REST that is so many times larger."""


def _nothing() -> None:
    """Do nothing."""


@dataclasses.dataclass(frozen=True)
class System:
    """A way of drafting, ready to be asked.

    Attributes:
        drafter: for replays.
        memory: bytes that it holds; what it keeps of a single request is not counted.
        mapped: whether they are mapped from disk, and may leave memory.
        nodes: the only number that it can be asked for; None: any.
        forget: drop what was learned from replays.
        close: give back what it holds.
    """

    drafter: Drafter
    memory: int = 0
    mapped: bool = True
    nodes: int | None = None
    forget: Callable[[], None] = _nothing
    close: Callable[[], None] = _nothing


class Texts:
    """The stored texts of a comparison: a REST store, and what others are made from.

    Attributes:
        source: the texts.
        store: all of them, indexed.
    """

    def __init__(self, workspace: Workspace, source: Source) -> None:
        """Open the store; it is built if it is not there yet."""
        self.workspace, self.source = workspace, source
        self.store: RestStore = workspace.store(source)

    @property
    def tokens(self) -> int:
        """How many tokens the documents have."""
        return self.store.manifest.counts["tokens"]

    def crest(self, *, published: bool) -> Path:
        """Return a CREST store in a fraction of REST's bytes: that of its paper, the most common n-grams, or ours."""
        most = int(self.tokens * AUTHORS_TOKEN_BYTES / PART_OF_REST)
        options = CrestOptions(f"{self.source.name}-drawn", max_bytes=most)
        if published:
            options = CrestOptions(
                f"{self.source.name}-published", selection="combined", rule="longest", max_bytes=most
            )
        return build_crest(options, self.store.path, self.workspace.work / "stores" / options.name).path


Maker = Callable[[Texts, int], System]
"""Makes a system of texts, to be asked for so many nodes.

Raises:
    ImportError: it is not installed.
"""


def _ours(texts: Texts, _nodes: int, *, request: bool = False, stored: bool = True) -> System:
    """Draft as draftstore does."""
    return _assembled(texts, Sources(stores=(texts.store.path,) if stored else (), request=request))


def _rest(texts: Texts, _nodes: int) -> System:
    """Draft by REST's rule."""
    return _assembled(texts, Sources(stores=(texts.store.path,), strategy="longest"))


def _crest(texts: Texts, _nodes: int, *, published: bool) -> System:
    """Draft from the tree of the longest n-gram alone."""
    strategy = "longest" if published else None
    return _assembled(texts, Sources(stores=(texts.crest(published=published),), strategy=strategy))


def _assembled(texts: Texts, sources: Sources) -> System:
    """Open sources; their memory is that of the stores' files, less the tokenizers."""
    tokenizer = texts.workspace.tokenizer
    assembly = assemble(sources, vocab_size=tokenizer.vocab_size, tokenizer=tokenizer.identity)
    held = sum(file.stat().st_size for store in sources.stores for file in store.glob("*.*"))
    return System(assembly, held, close=assembly.close)


def _prompt_lookup(_texts: Texts, _nodes: int) -> System:
    """Look up the request in itself."""
    return System(PromptLookup())


def _arctic(texts: Texts, _nodes: int) -> System:
    """Build the suffix tree of arctic-inference."""
    before, peer = _resident(), peers.Arctic()
    peer.build(split_documents(texts.store.index), texts.workspace.work)
    arctic = Arctic(peer.cache)
    return System(arctic, _resident() - before, mapped=False, forget=arctic.forget)


def _sglang(texts: Texts, nodes: int) -> System:
    """Build the external corpus of SGLang."""
    before = _resident()
    corpus = new_corpus(texts.store.index, nodes)
    return System(
        Ngram(corpus, nodes), _resident() - before, mapped=False, nodes=nodes, forget=corpus.reset
    )  # fmt: skip


def _resident() -> int:
    """Return the bytes of memory that this process holds, without what it has freed."""
    return resident(trim=True)["anonymous"]


OURS: dict[str, Maker] = {
    "stored text": _ours,
    "stored text in CREST": partial(_crest, published=False),
    "request": partial(_ours, request=True, stored=False),
    "stored text and request": partial(_ours, request=True),
}
"""draftstore by source: what carries probabilities."""
SYSTEMS: dict[str, Maker] = OURS | {
    "REST": _rest,
    "CREST": partial(_crest, published=True),
    "prompt lookup": _prompt_lookup,
    "arctic-inference": _arctic,
    "SGLang NGRAM": _sglang,
}
TEXTLESS = ("request", "prompt lookup")
"""Systems that use no stored text."""
IN_MEMORY = {"arctic-inference": "arctic_inference", "SGLang NGRAM": "sglang"}
"""Systems that hold 280 and 490 bytes for each token of the texts in memory, and get no more than the sample; the
modules that they are. benchmarks/peers.py and benchmarks/ngram.py say how to install them."""
