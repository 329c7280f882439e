"""The parts of an assembly: each source that a user named, opened and checked against the model."""

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from draftstore.assembly.sources import Sources
from draftstore.drafting.drafter import Drafter
from draftstore.drafting.fitting import FittedDrafter
from draftstore.drafting.request import RequestDrafter
from draftstore.errors import DraftstoreError, LookupServiceError
from draftstore.live.log import LiveDocument
from draftstore.live.memory import CONTEXT_SIZE
from draftstore.live.recall import RecallDrafter
from draftstore.live.shared import Vocabulary
from draftstore.live.store import LiveStore, LiveTarget
from draftstore.recycling.drafter import RecyclingDrafter
from draftstore.recycling.store import KIND as RECYCLING
from draftstore.recycling.store import open_drafter
from draftstore.remote.client import DEADLINE, RemoteStore
from draftstore.storage.locks import lease
from draftstore.storage.manifest import TokenizerIdentity, WatchedFiles, load_manifest
from draftstore.stores.dresd.store import KIND as DENSE
from draftstore.stores.dresd.store import DresdStore
from draftstore.stores.registry import Store, open_store
from draftstore.stores.rest.store import KIND as REST

LOG = logging.getLogger(__name__)
REQUEST, LIVE, RECALL, GRAMMAR = "request", "live", "recall", "grammar"


class Part(NamedTuple):
    """One drafter of an assembly.

    Attributes:
        kind: `rest`, `crest`, `dresd`, `lookup`, `live`, `recall`, `request`, `recycling` or `grammar`.
        name: display name.
        drafter: the drafter.
        strategy: the requested strategy, if supported.
        append: appends a document to a live store; None for other kinds and for read-only access.
    """

    kind: str
    name: str
    drafter: Drafter
    strategy: str | None = None
    append: Callable[[LiveDocument], object] | None = None

    @property
    def label(self) -> str:
        """The kind, or `KIND:NAME` for stores and releases."""
        return self.kind if self.kind in (REQUEST, RECYCLING, GRAMMAR) else f"{self.kind}:{self.name}"


class TargetModel(NamedTuple):
    """The model that sources must fit; see `assemble`."""

    vocab_size: int
    tokenizer: TokenizerIdentity
    name: str | None
    hidden_size: int | None


def open_parts(sources: Sources, model: TargetModel, opened: ExitStack) -> list[Part]:
    """Open all sources, which `opened` closes; see `draftstore.assembly.drafter.assemble`."""
    if sources.recall and sources.live is None:
        raise DraftstoreError(
            "answers are recalled from a live store: name one with `live`, or set `recall` to 0"
        )
    parts = list(_opened(sources, model, opened))
    if sources.strategy is not None and not any(part.strategy for part in parts):
        stores = ", ".join(part.name for part in parts) or "none given"
        raise DraftstoreError(
            f"no source here supports the strategy {sources.strategy!r} ({stores}): omit it, or name a store that "
            "supports it"
        )
    return parts


def _opened(sources: Sources, model: TargetModel, opened: ExitStack) -> Iterator[Part]:
    if sources.request:
        yield Part(REQUEST, "the request itself", RequestDrafter(model.vocab_size))
    recycled = False
    for path in sources.stores:
        kind = load_manifest(path).kind
        if kind == RECYCLING:
            recycled = True
            yield _recycled(path, model)
        else:
            yield _stored(path, kind, sources, model, opened)
    live_alone = sources.live is not None and sources.live.folder is None
    if sources.release is not None or (sources.lookup is not None and not live_alone):
        yield _looked_up(sources, model, opened)
    if sources.live is not None:
        yield from _remembered(sources, sources.live, model, opened)
    if sources.recycling and not recycled:
        yield Part(RECYCLING, "the model's candidates", RecyclingDrafter(model.vocab_size))


def _stored(path: Path, kind: str, sources: Sources, model: TargetModel, opened: ExitStack) -> Part:
    """Open a store built from text or from this model's hidden states."""
    opened.callback(lease(path).close)
    store: Store
    if kind == DENSE:
        store = DresdStore.open(path, target_model=model.name, hidden_size=model.hidden_size)
    else:
        store = open_store(path, sources.backend if kind == "crest" else None)
    opened.callback(store.close)
    files = WatchedFiles(path, store.manifest)
    opened.callback(files.close)
    store.manifest.require_tokenizer(model.tokenizer, path)
    strategy = sources.strategy if sources.strategy in store.strategies else None
    changes = {"threads": sources.threads} if kind == REST else {}
    drafter = store.drafter(strategy or store.default_strategy, **changes)
    return Part(kind, store.manifest.name, FittedDrafter(drafter, model.vocab_size, files.check), strategy)


def _recycled(path: Path, model: TargetModel) -> Part:
    drafter = open_drafter(
        path, vocab_size=model.vocab_size, tokenizer=model.tokenizer, target_model=model.name
    )
    return Part(RECYCLING, load_manifest(path).name, drafter)


def _looked_up(sources: Sources, model: TargetModel, opened: ExitStack) -> Part:
    """Find a release of the lookup service and check that it answers."""
    if not sources.release:
        raise DraftstoreError(f"no release given for {sources.lookup}: name one" + _served(sources))
    store = RemoteStore(
        sources.lookup, sources.release, token=sources.token, tokenizer=model.tokenizer,
        vocab_size=model.vocab_size, target_model=model.name,
        deadline=sources.deadline or DEADLINE,
    )  # fmt: skip
    opened.callback(store.close)
    facts = store.check()
    strategies = facts.get("strategies")
    known = isinstance(strategies, list) and sources.strategy in strategies
    strategy = sources.strategy if known else None
    found, size = store.hidden_size, model.hidden_size
    if found and size not in (None, found):
        raise LookupServiceError(
            f"the release {sources.release!r} needs hidden states of size {found:,}, this model's have size {size:,}: "
            "publish a build for this model, or use another release"
        )
    return Part("lookup", sources.release, store.drafter(strategy or ""), strategy)


def _remembered(
    sources: Sources, target: LiveTarget, model: TargetModel, opened: ExitStack
) -> Iterator[Part]:
    """Open a live store and, if wanted, recall from it the answers to each text's own prompt."""
    strategy = "supplement" if sources.stores or sources.release else "sole"
    store: LiveStore | RemoteStore
    append: Callable[[LiveDocument], object] | None
    if target.folder is not None or (sources.lookup is None and sources.release is None):
        store, append = _live_here(target, model, opened)
    else:
        store, append = _live_there(sources, target, model, opened, strategy)
    yield Part(LIVE, target.name, store.drafter(strategy), append=append)
    if sources.recall:
        yield Part(RECALL, target.name, RecallDrafter(store, model.vocab_size, sources.recall))


def _live_here(
    target: LiveTarget, model: TargetModel, opened: ExitStack
) -> tuple[LiveStore, Callable[[LiveDocument], object]]:
    """Open a live store of this process."""
    store = LiveStore(target.tokens, target.folder)
    opened.callback(store.close)
    store.agree(Vocabulary(model.vocab_size, model.tokenizer.fingerprint))
    return store, lambda document: store.append([document])


def _live_there(
    sources: Sources, target: LiveTarget, model: TargetModel, opened: ExitStack, strategy: str
) -> tuple[RemoteStore, Callable[[LiveDocument], object] | None]:
    """Find a live store of the lookup service, and check whether it accepts answers."""
    store = RemoteStore(
        sources.lookup, target.name, token=sources.token, tokenizer=model.tokenizer,
        vocab_size=model.vocab_size, deadline=sources.deadline or DEADLINE, context_size=CONTEXT_SIZE,
    )  # fmt: skip
    opened.callback(store.close)
    try:
        store.check_append()
    except LookupServiceError as error:
        store.check(strategy)
        LOG.warning("the live store %s is read-only; answers are not remembered: %s", target.name, error)
        return store, None
    return store, lambda document: store.append_documents([document])


def _served(sources: Sources) -> str:
    try:
        with RemoteStore(sources.lookup, "?", token=sources.token) as store:
            names = [str(release.get("name")) for release in store.releases()]
    except LookupServiceError:
        return ""
    return f"; it serves {', '.join(names)}" if names else "; it serves none"
