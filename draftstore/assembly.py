"""From what a user names to one drafter: stores, a release of the lookup service, the request, recycled candidates.

    sources = Sources(stores=(Path("stores/chat"),), request=True)
    with assemble(sources, vocab_size=32_000, tokenizer=identity) as drafter:
        session = drafter.session(prompt_ids)

Everything is checked before the first draft: stores and releases against the model's tokenizer, and that kernels are
compiled.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from draftstore.batch import Draft
from draftstore.client import RemoteStore
from draftstore.drafter import ContextSession, Drafter, Session, StoreDrafter
from draftstore.errors import DraftstoreError, LookupServiceError
from draftstore.manifest import TokenizerIdentity, load_manifest
from draftstore.mixture import Mixture
from draftstore.recycling import RecyclingDrafter
from draftstore.recycling_store import RecyclingStore
from draftstore.request import RequestDrafter
from draftstore.rest import DEFAULT_STRATEGY
from draftstore.stores import open_store
from draftstore.tree import DraftTree

RECYCLING = "recycling"
REQUEST = "request"


@dataclasses.dataclass(frozen=True)
class Sources:
    """What to draft from.

    Attributes:
        stores: directories of stores. One of kind `recycling` is where recycling starts.
        strategy: of stores and of the lookup service; None takes the default of each.
        backend: where the entries of CREST stores are read; None takes the first that each was built for.
        lookup: address of a lookup service; None is that of this user on this machine, if a release is named.
        release: name of a release or store that the lookup service serves.
        token: a bearer token, where the lookup service wants one.
        request: draft from the prompt and the output so far.
        recycling: draft from the model's own last candidates.
    """

    stores: tuple[Path, ...] = ()
    strategy: str | None = None
    backend: str | None = None
    lookup: str | None = None
    release: str | None = None
    token: str | None = None
    request: bool = False
    recycling: bool = False


class Part(NamedTuple):
    """One of the drafters of an assembly.

    Attributes:
        kind: `rest`, `crest`, `lookup`, `request` or `recycling`.
        name: for people.
        drafter: alone.
    """

    kind: str
    name: str
    drafter: Drafter


class Assembly:
    """One drafter of several, a `Drafter`; it closes what was opened for it.

    Attributes:
        parts: its drafters; without any it drafts nothing.
        drafter: the only one of them, or a mixture; None without any.
    """

    def __init__(self, parts: Sequence[Part], opened: ExitStack) -> None:
        """Mix `parts`; what they need is closed with `opened`."""
        self.parts = tuple(parts)
        self.drafter = _one_drafter([part.drafter for part in parts])
        self._opened = opened

    def session(
        self,
        prompt_ids: ArrayLike,
        *,
        hidden: NDArray[np.float32] | None = None,
        candidates: NDArray[np.int32] | None = None,
    ) -> Session:
        """Start the drafts of one text; see `Drafter.session`."""
        if self.drafter is None:
            return _Nothing()
        return self.drafter.session(prompt_ids, hidden=hidden, candidates=candidates)

    def part(self, kind: str) -> Part | None:
        """Return the first drafter of a kind, if there is one."""
        return next((part for part in self.parts if part.kind == kind), None)

    def close(self) -> None:
        """Close stores and connections; from now on nothing may be drafted."""
        self._opened.close()

    def __enter__(self) -> "Assembly":
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


def assemble(
    sources: Sources, *, vocab_size: int, tokenizer: TokenizerIdentity, model: str | None = None
) -> Assembly:
    """Open everything that is to be drafted from.

    Args:
        sources: what the user named.
        vocab_size: ids that the model knows.
        tokenizer: of the model.
        model: its name; recycled candidates of another one are refused. None takes any.

    Raises:
        StoreError: a store cannot be opened, or holds another model's candidates.
        TokenizerError: a store was built with another tokenizer.
        LookupServiceError: the service is away, or refuses the release.
        DraftstoreError: settings that make no sense together.
    """
    with ExitStack() as opened:
        parts = list(_parts(sources, vocab_size, tokenizer, model, opened))
        assembly = Assembly(parts, opened.pop_all())
    _warm_up(assembly)
    return assembly


def _parts(
    sources: Sources, vocab_size: int, tokenizer: TokenizerIdentity, model: str | None, opened: ExitStack
) -> Iterator[Part]:
    """Yield the drafters, those that others should yield to first."""
    if sources.request:
        yield Part(REQUEST, "the request itself", RequestDrafter(vocab_size))
    recycled = False
    for path in sources.stores:
        if load_manifest(path).kind == RECYCLING:
            recycled = True
            yield _recycled(path, vocab_size, tokenizer, model)
        else:
            yield _stored(path, sources, vocab_size, tokenizer, opened)
    if sources.lookup is not None or sources.release is not None:
        yield _looked_up(sources, vocab_size, tokenizer, opened)
    if sources.recycling and not recycled:
        yield Part(RECYCLING, "the model's candidates", RecyclingDrafter(vocab_size))


def _stored(
    path: Path, sources: Sources, vocab_size: int, tokenizer: TokenizerIdentity, opened: ExitStack
) -> Part:
    """Open a store of text.

    Raises:
        StoreError: it cannot be opened.
        TokenizerError: it was built with another tokenizer.
    """
    manifest = load_manifest(path)
    backend = sources.backend if manifest.kind == "crest" else None
    store = open_store(path, backend)
    opened.callback(store.close)
    manifest.require_tokenizer(tokenizer, path)
    drafter = store.drafter(sources.strategy or DEFAULT_STRATEGY)
    fitting: Drafter = drafter if manifest.vocab_size == vocab_size else _Fitted(drafter, vocab_size)
    return Part(manifest.kind, manifest.name, fitting)


def _recycled(path: Path, vocab_size: int, tokenizer: TokenizerIdentity, model: str | None) -> Part:
    """Open recycled candidates of this model.

    Raises:
        StoreError: they are of another model.
        TokenizerError: or of another tokenizer.
    """
    store = RecyclingStore.open(path, target_model=model, tokenizer=tokenizer, vocab_size=vocab_size)
    return Part(RECYCLING, store.manifest.name, store.drafter(vocab_size=vocab_size))


def _looked_up(sources: Sources, vocab_size: int, tokenizer: TokenizerIdentity, opened: ExitStack) -> Part:
    """Find a release of the lookup service, and that it answers.

    Raises:
        LookupServiceError: it does not.
        DraftstoreError: no release is named.
    """
    if not sources.release:
        raise DraftstoreError(f"which release of {sources.lookup}? Name it with --release" + _served(sources))
    store = RemoteStore(
        sources.lookup, sources.release, token=sources.token, tokenizer=tokenizer, vocab_size=vocab_size
    )
    opened.callback(store.close)
    strategy = sources.strategy or ""
    store.check(strategy)
    return Part("lookup", sources.release, store.drafter(strategy))


def _served(sources: Sources) -> str:
    """Say which releases a lookup service serves, if it tells."""
    try:
        with RemoteStore(sources.lookup, "?", token=sources.token) as store:
            names = [str(release.get("name")) for release in store.releases()]
    except LookupServiceError:
        return ""
    return f": it serves {', '.join(names)}" if names else ": it serves none"


def _one_drafter(drafters: Sequence[Drafter]) -> Drafter | None:
    """Return one drafter of all."""
    if len(drafters) <= 1:
        return drafters[0] if drafters else None
    return Mixture(drafters)


def _warm_up(assembly: Assembly) -> None:
    """Have every kernel compiled: the first text should not wait."""
    for drafter in (*(part.drafter for part in assembly.parts), assembly.drafter):
        warm_up = getattr(drafter, "warm_up", None)
        if warm_up is not None:
            warm_up()


class _Fitted:
    """A store's drafter for a model that knows more ids than its tokenizer, or fewer: a `ContextDrafter`.

    More of them pad the model's matrices. A model may emit those all the same; then the text before them is lost to the
    store, no more. Fewer are there where tokens were added to a tokenizer that the model never learned; these are cut
    out of drafts.
    """

    def __init__(self, drafter: StoreDrafter, vocab_size: int) -> None:
        """Draft as `drafter`, for ids below `vocab_size`."""
        self._drafter = drafter
        self.context_size = drafter.context_size
        self.vocab_size = vocab_size

    def warm_up(self) -> None:
        """Have the store's kernels compiled."""
        self._drafter.warm_up()

    def draft(self, contexts: NDArray[np.int32], budget: int = 64, min_prob: float = 0.0) -> list[Draft]:
        """Draft for a batch of contexts; see `ContextDrafter.draft`."""
        known = np.where(contexts < self._drafter.vocab_size, contexts, np.int32(-1))
        drafts = self._drafter.draft(known, budget, min_prob)
        return [draft._replace(tree=below(draft.tree, self.vocab_size)) for draft in drafts]

    def session(self, prompt_ids: ArrayLike, **_prefill: Any) -> ContextSession:
        """Start the drafts of one text; see `Drafter.session`."""
        return ContextSession(self, prompt_ids)


def below(tree: DraftTree, vocab_size: int) -> DraftTree:
    """Return a draft without the nodes of ids outside a vocabulary, and without what hangs on them."""
    if len(tree) == 0 or int(tree.tokens.max()) < vocab_size:
        return tree
    places = np.full(len(tree) + 1, -1, np.int64)  # of the nodes that stay, behind that of the context
    kept: list[int] = []
    for node, (token, parent) in enumerate(zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True)):
        if token < vocab_size and (parent < 0 or places[parent + 1] >= 0):
            places[node + 1] = len(kept)
            kept.append(node)
    return DraftTree(tree.tokens[kept], places[tree.parents[kept] + 1].astype(np.int16), tree.levels[kept])


class _Nothing:
    """A session that drafts nothing."""

    needs_candidates = False
    needs_hidden = False

    def propose(self, *_asked: Any, **_named: Any) -> DraftTree:
        """Return the empty tree."""
        return DraftTree.empty()

    def observe(self, accepted_ids: ArrayLike, **_feedback: Any) -> None:
        """Take in nothing."""
