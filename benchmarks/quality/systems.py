"""The systems of `benchmarks.quality`: draftstore by source, published methods in draftstore, other libraries."""

import dataclasses
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import TypeVar

from benchmarks.common import AUTHORS_TOKEN_BYTES, PART_OF_REST, Source, Workspace, split_documents
from benchmarks.measure import resident
from benchmarks.quality.libraries import Arctic, Ngram, PromptLookup
from benchmarks.quality.ngram import new_corpus
from benchmarks.stores.published import build_published
from draftstore.assembly.drafter import assemble
from draftstore.assembly.sources import Sources
from draftstore.decoding.replay import Recording
from draftstore.drafting.drafter import Drafter
from draftstore.stores.crest.build import CrestOptions, build_crest
from draftstore.stores.rest.store import RestStore

Made = TypeVar("Made")


def _nothing(*_given: object) -> None:
    """Do nothing."""


@dataclasses.dataclass(frozen=True)
class System:
    """A way of drafting.

    Attributes:
        drafter: drafter for replays.
        memory: bytes that it holds, without state of single requests.
        mapped: whether they are mapped from disk and can be evicted from memory.
        nodes: the only draft size that it was made for; None: any.
        learn: called with every output after its replay, if the drafter does not learn by itself.
        forget: drops everything learned from replays.
        close: releases its resources.
    """

    drafter: Drafter
    memory: int = 0
    mapped: bool = True
    nodes: int | None = None
    learn: Callable[[Recording], None] = _nothing
    forget: Callable[[], None] = _nothing
    close: Callable[[], None] = _nothing


class Texts:
    """The stored texts of a comparison: a REST store, the source of the other systems."""

    def __init__(self, workspace: Workspace, source: Source) -> None:
        """Open the store, building it if necessary."""
        self.workspace, self.source = workspace, source
        self.store: RestStore = workspace.store(source)

    @property
    def tokens(self) -> int:
        """Number of tokens in the documents."""
        return self.store.manifest.counts["tokens"]

    @property
    def crest_bytes(self) -> int:
        """The bytes of CREST stores: a fraction of REST's."""
        return int(self.tokens * AUTHORS_TOKEN_BYTES / PART_OF_REST)


Maker = Callable[[Texts, int], System]
"""Makes a system from texts, for drafts of so many nodes."""


def _ours(texts: Texts, _nodes: int, *, request: bool = False, stored: bool = True) -> System:
    """Draft as draftstore does."""
    return _assembled(texts, Sources(stores=(texts.store.path,) if stored else (), request=request))


def _rest(texts: Texts, _nodes: int) -> System:
    """Draft by REST's rule."""
    return _assembled(texts, Sources(stores=(texts.store.path,), strategy="longest"))


def _crest(texts: Texts, _nodes: int) -> System:
    """Draft from a CREST store."""
    options = CrestOptions(name=f"{texts.source.name}-drawn", max_bytes=texts.crest_bytes)
    path = build_crest(options, texts.store.path, texts.workspace.work / "stores" / options.name).path
    return _assembled(texts, Sources(stores=(path,)))


def _published_crest(texts: Texts, _nodes: int) -> System:
    """Draft as the paper on CREST does."""
    path = texts.workspace.work / f"{texts.source.name}-published.lmdb"
    made = build_published(texts.store, path, ngrams=texts.crest_bytes, max_bytes=texts.crest_bytes)
    return System(made.drafter, made.bytes)


def _assembled(texts: Texts, sources: Sources) -> System:
    """Open sources; their memory is the size of the stores' files without the tokenizers."""
    tokenizer = texts.workspace.tokenizer
    assembly = assemble(sources, vocab_size=tokenizer.vocab_size, tokenizer=tokenizer.identity)
    held = sum(file.stat().st_size for store in sources.stores for file in store.glob("*.*"))
    return System(assembly, held, close=assembly.close)


def _prompt_lookup(_texts: Texts, _nodes: int) -> System:
    return System(PromptLookup())


def _arctic(texts: Texts, _nodes: int) -> System:
    """Build the suffix tree of arctic-inference."""
    arctic, memory = _weigh(lambda: Arctic(split_documents(texts.store.index)))
    return System(arctic, memory, mapped=False, forget=arctic.forget)


def _sglang(texts: Texts, nodes: int) -> System:
    """Build the external corpus of SGLang."""
    corpus, memory = _weigh(lambda: new_corpus(texts.store.index, nodes))
    return System(Ngram(corpus), memory, mapped=False, nodes=nodes, forget=corpus.reset)


def _weigh(make: Callable[[], Made]) -> tuple[Made, int]:
    """Return the result of a factory, and the bytes by which this process has grown."""
    before = resident(trim=True)["anonymous"]
    made = make()
    return made, resident(trim=True)["anonymous"] - before


OURS: dict[str, Maker] = {
    "stored text": _ours,
    "stored text in CREST": _crest,
    "request": partial(_ours, request=True, stored=False),
    "stored text and request": partial(_ours, request=True),
}
"""draftstore by source; these have probabilities."""
SYSTEMS: dict[str, Maker] = OURS | {
    "REST": _rest,
    "CREST": _published_crest,
    "prompt lookup": _prompt_lookup,
    "arctic-inference": _arctic,
    "SGLang NGRAM": _sglang,
}
TEXTLESS = ("request", "prompt lookup")
"""Systems that use no stored text."""
LIBRARIES = {
    "arctic-inference": "arctic_inference",
    "SGLang NGRAM": "sglang",
}
"""Other systems, and their modules. They hold the texts in memory, and get only the sample."""


def absent() -> list[str]:
    """Return the systems that are not installed."""
    return [name for name, module in LIBRARIES.items() if find_spec(module) is None]
