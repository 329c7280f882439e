"""Assembly of a drafter from named sources: stores, a release of the lookup service, the request, recycling.

    sources = Sources(stores=(Path("stores/chat"),), request=True)
    with assemble(sources, vocab_size=32_000, tokenizer=identity) as drafter:
        session = drafter.session(prompt_ids)

Stores and releases are checked against the model's tokenizer, and all kernels are compiled, before the first draft.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import Field

from draftstore.decoding.grammars import Grammar, GrammarDrafter
from draftstore.drafting.drafter import Drafter, separated
from draftstore.drafting.fitting import FittedDrafter
from draftstore.drafting.mixture import Mixture
from draftstore.drafting.request import RequestDrafter
from draftstore.drafting.slots import SlotDrafter, Slots, start
from draftstore.errors import DraftstoreError, LookupServiceError
from draftstore.jit import CORES
from draftstore.live.log import LiveDocument
from draftstore.live.memory import CONTEXT_SIZE
from draftstore.live.shared import Vocabulary
from draftstore.live.store import LiveStore, LiveTarget
from draftstore.options import Number, Options, Shown, parsed
from draftstore.recycling.drafter import RecyclingDrafter
from draftstore.recycling.store import KIND as RECYCLING
from draftstore.recycling.store import open_drafter
from draftstore.remote.client import DEADLINE, RemoteStore
from draftstore.storage.locks import lease
from draftstore.storage.manifest import TokenizerIdentity, WatchedFiles, load_manifest
from draftstore.stores.crest.entries import Backend
from draftstore.stores.dresd.store import KIND as DENSE
from draftstore.stores.dresd.store import DresdStore
from draftstore.stores.registry import KINDS, Store, kind_of, open_store, strategies_of
from draftstore.stores.rest.store import KIND as REST

LOG = logging.getLogger(__name__)
REQUEST, LIVE, GRAMMAR = "request", "live", "grammar"

TOKEN_VARIABLE = "DRAFTSTORE_TOKEN"  # noqa: S105 (the name of a variable)


def _known_strategies() -> str:
    titles: dict[tuple[str, ...], list[str]] = {}
    for kind in map(kind_of, KINDS):
        titles.setdefault(kind.strategies, []).append(kind.title)
    return "; ".join(
        f"{' and '.join(kinds)} {'support' if len(kinds) > 1 else 'supports'} {', '.join(strategies)}"
        for strategies, kinds in titles.items()
        if strategies
    )


Strategy = Annotated[
    str | None,
    Shown(choices=tuple(sorted(strategies_of(KINDS))), unset="each store's own", expert=True),
    Field(
        description="How stores draft; a store that does not support the strategy uses its default. "
        f"{_known_strategies()}.",
        examples=["longest"],
    ),
]
"""The strategy option of commands that draft."""


class Sources(Options):
    """The sources of drafts.

    Attributes:
        threads: maximum threads for drafts of several texts from a REST store.
    """

    stores: Annotated[tuple[Path, ...], Shown(flags=("--store",), metavar="DIR")] = Field(
        (),
        description="Draft from this store; Token Recycling starts from a store of kind recycling. Stores of kind "
        "dresd and recycling must belong to this model. May be repeated.",
        examples=[["stores/chat", "stores/code"]],
    )
    strategy: Strategy = None
    backend: Backend = None
    lookup: Annotated[str | None, Shown(metavar="ADDRESS", unset="this user's own, with --release")] = Field(
        None,
        description="Draft from a lookup service: unix:/path, host:port or tls://host:port.",
        examples=["unix:/run/draftstore/lookup.sock", "tls://drafts:7781"],
    )
    release: Annotated[str | None, Shown(metavar="NAME")] = Field(
        None, description="Release or store to ask the lookup service for.", examples=["chat-vicuna"]
    )
    token: Annotated[
        str | None, Shown(flags=("--lookup-token",), metavar="TOKEN", variable=TOKEN_VARIABLE)
    ] = Field(
        None,
        description="Bearer token, if the service requires one; the variable keeps it out of process lists.",
    )
    deadline: Annotated[
        float | None,
        Number,
        Shown(
            flags=("--lookup-deadline",),
            metavar="SECONDS",
            unset=f"{DEADLINE}; in a worker whose model was measured by `tune`, a tenth of a pass if that is longer",
            expert=True,
        ),
    ] = Field(
        None,
        gt=0,
        le=60,
        description="Maximum seconds that a step waits for the lookup service; networks need more.",
        examples=[0.01],
    )
    live: Annotated[
        LiveTarget | None, parsed(LiveTarget.parse), Shown(metavar="NAME[=DIR][:TOKENS]", unset="nothing")
    ] = Field(
        None,
        description="Remember finished answers, at most TOKENS of them (a million), and draft from them: with --lookup "
        "or --release in the live store NAME of the service, shared by all clients of that name; with DIR, or without "
        "a service, in this process. See docs/security.md.",
        examples=["team", "team=live/team:200000"],
    )
    request: bool = Field(True, description="Draft from the prompt and the output so far.")
    recycling: Annotated[bool, Shown(flags=("--recycling/--no-recycling",))] = Field(
        False, description="Draft from the model's last candidates."
    )
    threads: Annotated[int, Number, Shown(hidden=True)] = Field(min(4, CORES), ge=1)

    def beside(self, folder: Path) -> Self:
        """Return the same sources with relative paths in a folder."""
        live = self.live and self.live._replace(folder=self.live.folder and folder / self.live.folder)
        return self.changed(stores=tuple(folder / path for path in self.stores), live=live)


class Part(NamedTuple):
    """One drafter of an assembly.

    Attributes:
        kind: `rest`, `crest`, `dresd`, `lookup`, `live`, `request`, `recycling` or `grammar`.
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

    def remember(self, prompt: NDArray[np.integer[Any]], output: ArrayLike, digest: bytes = b"") -> None:
        """Append a finished answer to the live store, if there is one. Never raises.

        Args:
            prompt: int32 [any].
            output: int32 [any], the answer.
            digest: 16 bytes that identify the document (`draftstore.text.digests`); empty: unknown.
        """
        for append in self._appends:
            try:
                whole = LiveDocument.of(prompt, output, digest)
                known = separated(whole.ids, self.vocab_size)
                start = 1 + max(np.flatnonzero(known < 0).tolist(), default=-1)  # what follows an image
                append(whole._replace(ids=known[start:], lead=max(0, whole.lead - start)))
            except Exception as error:  # noqa: BLE001 (the answer is complete; only later drafts suffer)
                LOG.warning("could not remember an answer: %s", error)

    def without_live(self) -> "Assembly":
        """Return the same drafters without the live store, for texts that opt out; closing the result does nothing."""
        others = [part for part in self.parts if part.kind != LIVE]
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
        parts = list(_parts(sources, _TargetModel(vocab_size, tokenizer, model, hidden_size), opened))
        _check_strategy(sources, parts)
        assembly = Assembly(parts, vocab_size, opened.pop_all())
    _warm_up(assembly)
    return assembly


class _TargetModel(NamedTuple):
    """The model that sources must fit; see `assemble`."""

    vocab_size: int
    tokenizer: TokenizerIdentity
    name: str | None
    hidden_size: int | None


def _parts(sources: Sources, model: _TargetModel, opened: ExitStack) -> Iterator[Part]:
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
        yield _remembered(sources, sources.live, model, opened)
    if sources.recycling and not recycled:
        yield Part(RECYCLING, "the model's candidates", RecyclingDrafter(model.vocab_size))


def _stored(path: Path, kind: str, sources: Sources, model: _TargetModel, opened: ExitStack) -> Part:
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


def _recycled(path: Path, model: _TargetModel) -> Part:
    drafter = open_drafter(
        path, vocab_size=model.vocab_size, tokenizer=model.tokenizer, target_model=model.name
    )
    return Part(RECYCLING, load_manifest(path).name, drafter)


def _check_strategy(sources: Sources, parts: Sequence[Part]) -> None:
    if sources.strategy is not None and not any(part.strategy for part in parts):
        stores = ", ".join(part.name for part in parts) or "none given"
        raise DraftstoreError(
            f"no source here supports the strategy {sources.strategy!r} ({stores}): omit it, or name a store that "
            "supports it"
        )


def _looked_up(sources: Sources, model: _TargetModel, opened: ExitStack) -> Part:
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


def _remembered(sources: Sources, target: LiveTarget, model: _TargetModel, opened: ExitStack) -> Part:
    strategy = "supplement" if sources.stores or sources.release else "sole"
    if target.folder is not None or (sources.lookup is None and sources.release is None):
        live = LiveStore(target.tokens, target.folder)
        opened.callback(live.close)
        live.agree(Vocabulary(model.vocab_size, model.tokenizer.fingerprint))
        return Part(
            LIVE, target.name, live.drafter(strategy), append=lambda document: live.append([document])
        )
    store = RemoteStore(
        sources.lookup, target.name, token=sources.token, tokenizer=model.tokenizer,
        vocab_size=model.vocab_size, deadline=sources.deadline or DEADLINE, context_size=CONTEXT_SIZE,
    )  # fmt: skip
    opened.callback(store.close)
    append: Callable[[LiveDocument], object] | None = None
    try:
        store.check_append()
        append = lambda found: store.append(found.ids, found.lead, digest=found.digest)  # noqa: E731
    except LookupServiceError as error:
        store.check(strategy)
        LOG.warning("the live store %s is read-only; answers are not remembered: %s", target.name, error)
    return Part(LIVE, target.name, store.drafter(strategy), append=append)


def _served(sources: Sources) -> str:
    try:
        with RemoteStore(sources.lookup, "?", token=sources.token) as store:
            names = [str(release.get("name")) for release in store.releases()]
    except LookupServiceError:
        return ""
    return f"; it serves {', '.join(names)}" if names else "; it serves none"


def _warm_up(assembly: Assembly) -> None:
    """Compile every kernel so that the first text need not wait."""
    for drafter in (*(part.drafter for part in assembly.parts), assembly.drafter):
        warm_up = getattr(drafter, "warm_up", None)
        if warm_up is not None:
            warm_up()
