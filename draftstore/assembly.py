"""Assembly of one drafter from named sources: stores, a release of the lookup service, the request, recycling.

    sources = Sources(stores=(Path("stores/chat"),), request=True)
    with assemble(sources, vocab_size=32_000, tokenizer=identity) as drafter:
        session = drafter.session(prompt_ids)

Before the first draft, stores and releases are checked against the model's tokenizer, and all kernels are compiled.
"""

import dataclasses
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from draftstore.drafting.drafter import Drafter, Session, projection_of
from draftstore.drafting.faults import DisabledSession
from draftstore.drafting.fitting import fitted
from draftstore.drafting.mixture import Mixture
from draftstore.drafting.projection import Projection
from draftstore.drafting.recycling import RecyclingDrafter
from draftstore.drafting.request import RequestDrafter
from draftstore.errors import DraftstoreError, LookupServiceError
from draftstore.jit import CORES
from draftstore.remote.client import DEADLINE, RemoteStore
from draftstore.remote.partitions import addresses_of, open_release, require_all
from draftstore.storage.lease import StoreLease
from draftstore.storage.manifest import TokenizerIdentity, load_manifest
from draftstore.stores.dresd.store import KIND as DENSE
from draftstore.stores.dresd.store import DresdStore
from draftstore.stores.recycling.store import RecyclingStore
from draftstore.stores.registry import Store, open_store
from draftstore.stores.rest.store import KIND as REST

RECYCLING = "recycling"
REQUEST = "request"


@dataclasses.dataclass(frozen=True)
class Sources:
    """The sources of drafts.

    Attributes:
        stores: directories of stores; one of kind `recycling` initialises recycling.
        strategy: strategy for stores and a release that support it; others use their default.
        backend: backend of CREST stores' entries; None: the first that each was built for.
        lookup: address of a lookup service, or several with commas between them, each of which serves a partition of
            the release; None: this user's service on this machine, if a release is named.
        release: name of a release or store of the lookup service.
        token: bearer token, if the lookup service needs one.
        deadline: seconds to wait for it at each step; None: its client's default, which suits few texts at a time.
        request: whether to draft from the prompt and the output so far.
        recycling: whether to draft from the model's own last candidates.
        threads: maximum threads for drafts of several texts from a REST store.
    """

    stores: tuple[Path, ...] = ()
    strategy: str | None = None
    backend: str | None = None
    lookup: str | None = None
    release: str | None = None
    token: str | None = None
    deadline: float | None = None
    request: bool = False
    recycling: bool = False
    threads: int = min(4, CORES)


class Part(NamedTuple):
    """One drafter of an assembly.

    Attributes:
        kind: `rest`, `crest`, `dresd`, `lookup`, `request` or `recycling`.
        name: display name.
        drafter: the drafter.
        strategy: the requested strategy, if supported.
    """

    kind: str
    name: str
    drafter: Drafter
    strategy: str | None = None

    @property
    def label(self) -> str:
        """Its kind; of stores and releases `KIND:NAME`."""
        return self.kind if self.kind in (REQUEST, RECYCLING) else f"{self.kind}:{self.name}"


class Assembly:
    """One drafter made of several, a `Drafter`; it owns the resources opened for it.

    Attributes:
        parts: its drafters; may be empty.
        drafter: a single drafter, or a mixture; None without any.
    """

    def __init__(self, parts: Sequence[Part], opened: ExitStack) -> None:
        """Mix `parts`; their resources are closed with `opened`."""
        self.parts = tuple(parts)
        self.drafter = _one_drafter([part.drafter for part in parts])
        self._opened = opened

    @property
    def projection(self) -> Projection | None:
        """Projection for hidden states, see `draftstore.drafting.drafter.projection_of`."""
        return projection_of(self.drafter)

    @property
    def needs_candidates(self) -> bool:
        """Whether a drafter needs the candidates of a prompt, see `Drafter.session`."""
        return bool(getattr(self.drafter, "needs_candidates", False))

    def session(
        self,
        prompt_ids: ArrayLike,
        *,
        hidden: NDArray[np.float32] | None = None,
        candidates: NDArray[np.int32] | None = None,
    ) -> Session:
        """Start the drafts of one text; see `Drafter.session`."""
        if self.drafter is None:
            return DisabledSession()
        return self.drafter.session(prompt_ids, hidden=hidden, candidates=candidates)

    def predicting(self, prediction: ArrayLike, vocab_size: int) -> Drafter:
        """Return a drafter that also drafts from a prediction of one answer.

        Args:
            prediction: int32 [any], what is expected to follow the prompt.
            vocab_size: size of the model's vocabulary.

        Raises:
            TokenRangeError: an id of the prediction lies outside the vocabulary.
        """
        others = [part.drafter for part in self.parts if part.kind != REQUEST]
        return Mixture([RequestDrafter(vocab_size, prediction=prediction), *others])

    def part(self, kind: str) -> Part | None:
        """Return the first drafter of a kind, if there is one."""
        return next((part for part in self.parts if part.kind == kind), None)

    def close(self) -> None:
        """Close stores and connections; no more drafts may be made."""
        self._opened.close()

    def __enter__(self) -> "Assembly":
        return self

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
        model: name of the model; candidates and hidden states of another one are refused. None accepts any.
        hidden_size: dimensions of its hidden states; dense stores for others are refused. None accepts any.

    Raises:
        StoreError: a store cannot be opened, or belongs to another model.
        TokenizerError: a store was built with another tokenizer.
        LookupServiceError: the service is down or refuses the release.
        DraftstoreError: inconsistent settings.
    """
    with ExitStack() as opened:
        parts = list(_parts(sources, _TargetModel(vocab_size, tokenizer, model, hidden_size), opened))
        _check_strategy(sources, parts)
        assembly = Assembly(parts, opened.pop_all())
    _warm_up(assembly)
    return assembly


class _TargetModel(NamedTuple):
    """The model that sources must fit, see `assemble`."""

    vocab_size: int
    tokenizer: TokenizerIdentity
    name: str | None
    hidden_size: int | None


def _parts(sources: Sources, model: _TargetModel, opened: ExitStack) -> Iterator[Part]:
    """Yield the drafters in order of priority."""
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
    if sources.lookup is not None or sources.release is not None:
        yield _looked_up(sources, model, opened)
    if sources.recycling and not recycled:
        yield Part(RECYCLING, "the model's candidates", RecyclingDrafter(model.vocab_size))


def _stored(path: Path, kind: str, sources: Sources, model: _TargetModel, opened: ExitStack) -> Part:
    """Open a store of text, or of this model's hidden states."""
    opened.callback(StoreLease(path).close)
    store: Store
    if kind == DENSE:
        store = DresdStore.open(path, target_model=model.name, hidden_size=model.hidden_size)
    else:
        store = open_store(path, sources.backend if kind == "crest" else None)
    opened.callback(store.close)
    store.manifest.require_tokenizer(model.tokenizer, path)
    strategy = _known(sources.strategy, store.strategies)
    changes = {"threads": sources.threads} if kind == REST else {}
    drafter = fitted(store.drafter(strategy or store.default_strategy, **changes), model.vocab_size)
    return Part(kind, store.manifest.name, drafter, strategy)


def _recycled(path: Path, model: _TargetModel) -> Part:
    """Open this model's recycled candidates."""
    size = model.vocab_size
    store = RecyclingStore.open(path, target_model=model.name, tokenizer=model.tokenizer, vocab_size=size)
    return Part(RECYCLING, store.manifest.name, store.drafter(vocab_size=size))


def _known(strategy: str | None, strategies: Collection[str]) -> str | None:
    """Return the requested strategy if it is among a store's; None: that store's default."""
    return strategy if strategy in strategies else None


def _check_strategy(sources: Sources, parts: Sequence[Part]) -> None:
    """Refuse a strategy that no store supports."""
    if sources.strategy is not None and not any(part.strategy for part in parts):
        stores = ", ".join(part.name for part in parts) or "there is none"
        raise DraftstoreError(
            f"no store here knows the strategy {sources.strategy!r} ({stores}): leave the strategy out, or name a "
            "store that knows it"
        )


def _looked_up(sources: Sources, model: _TargetModel, opened: ExitStack) -> Part:
    """Find a release of the lookup service and check that it answers."""
    if not sources.release:
        raise DraftstoreError(f"no release of {sources.lookup} is named: name one" + _served(sources))
    store = open_release(
        sources.lookup, sources.release, token=sources.token, tokenizer=model.tokenizer,
        vocab_size=model.vocab_size, target_model=model.name,
        deadline=DEADLINE if sources.deadline is None else sources.deadline,
    )  # fmt: skip
    opened.callback(store.close)
    facts = store.check()
    if isinstance(store, RemoteStore):
        require_all([facts], sources.release)
    strategies = facts.get("strategies")
    strategy = _known(sources.strategy, strategies if isinstance(strategies, list) else ())
    found = None if store.projection is None else store.projection.hidden_size
    if found is not None and model.hidden_size not in (None, found):
        raise LookupServiceError(
            f"the release {sources.release!r} needs hidden states of {found:,} numbers, this model's have "
            f"{model.hidden_size:,}: publish a build for this model, or ask for another release"
        )
    return Part("lookup", sources.release, store.drafter(strategy or ""), strategy)


def _served(sources: Sources) -> str:
    """List the releases of a lookup service, if it answers."""
    try:
        with RemoteStore(addresses_of(sources.lookup)[0], "?", token=sources.token) as store:
            names = [str(release.get("name")) for release in store.releases()]
    except LookupServiceError:
        return ""
    return f"; it serves {', '.join(names)}" if names else "; it serves none"


def _one_drafter(drafters: Sequence[Drafter]) -> Drafter | None:
    """Return the only drafter, or a mixture of several; None without any."""
    return Mixture(drafters) if len(drafters) > 1 else next(iter(drafters), None)


def _warm_up(assembly: Assembly) -> None:
    """Compile every kernel, so that the first text need not wait."""
    for drafter in (*(part.drafter for part in assembly.parts), assembly.drafter):
        warm_up = getattr(drafter, "warm_up", None)
        if warm_up is not None:
            warm_up()
