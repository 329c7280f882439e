"""Open stores and the names that they are served under: built ones, and live ones that decoders append to.

A reader gets it from `Releases.get` and keeps it to the end of one request, so that no answer mixes builds.

A store is warmed before its first request: its files are read into memory, its kernels compiled, drafts made. That runs
beside requests in the same process, so it works in pieces of a fraction of a millisecond, reads without the GIL, and
sleeps after each piece: a thread that never sleeps would block a busy processor for milliseconds.
"""

import logging
import time
from collections.abc import Iterable
from contextlib import ExitStack, closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias

from draftstore.drafting.contexts import ContextDrafter
from draftstore.errors import StoreError
from draftstore.live import memory
from draftstore.live.memory import CONTEXT_SIZE, DEFAULT, RULES, MemoryDrafter
from draftstore.live.shared import Vocabulary
from draftstore.live.store import LiveStore, LiveTarget
from draftstore.remote.wire import AppendRequest, DraftRequest, short_hash
from draftstore.storage.locks import lease
from draftstore.storage.manifest import (
    TOKENIZER_FOLDER,
    Manifest,
    WatchedFiles,
    load_manifest,
    manifest_digest,
)
from draftstore.stores.crest.entries import POSTGRES
from draftstore.stores.registry import KINDS, Store, kind_of, open_store
from draftstore.text.tokenizer import TextTokenizer, load_tokenizer
from draftstore.trees import batch
from draftstore.trees.batch import DraftBatch
from services.common.logs import LOADING_KERNELS
from services.lookup.settings import Target

LOG = logging.getLogger(__name__)
PIECE = 1 << 20
"""Bytes read at a time."""
REST = 0.001
"""Seconds between two pieces: requests lose a twentieth of their time, not a fifth."""
SHARE = 0.5
"""Fraction of available memory that warming a store may fill."""
SAMPLES = 200
"""Drafts per warm-up."""
FILES = "files"
"""Backend of stores without a choice."""
PACE = 2e-4
"""Seconds of a draft of 64 nodes from a live store for one context."""


class Served:
    """An open store, warmed, with all that answers need."""

    def __init__(self, target: Target, texts: Iterable[TextTokenizer] = ()) -> None:
        """Open and warm the store of a target; DraftstoreError or OSError if it cannot be used.

        `texts` are tokenizers that are loaded already: loading one holds the interpreter's lock for 0.2 s.
        """
        with ExitStack() as opened:
            opened.enter_context(lease(target.path))
            digest = _require_digest(target, target.digest)
            self._manifest = manifest = load_manifest(target.path)
            kind = kind_of(manifest.kind)
            backend = kind.backend(manifest, target.backend)
            store = opened.enter_context(closing(open_store(target.path, backend)))
            self._files = opened.enter_context(closing(WatchedFiles(target.path, manifest)))
            # A new build replaces the whole directory: files of both builds may have been opened here.
            _require_digest(target, digest)
            self._drafters = {name: store.drafter(name) for name in store.strategies}
            self.text = _tokenizer(target, manifest, texts)
            self.pace = warm_store(store, self._drafters.values())  # seconds of a usual draft for a context
            self._drafters[""] = self._drafters[store.default_strategy]
            self._opened = opened.pop_all()
        self.target = target._replace(digest=digest)
        self.name = target.name
        self.build = short_hash(digest)  # as sent in answers, like the fingerprint of the tokenizer
        self.tokenizer = short_hash(manifest.tokenizer.fingerprint)
        self.kind = manifest.kind
        self.backend = backend or FILES
        self.slow = backend == POSTGRES  # lookups wait for a server, and belong in a thread
        self.strategies = store.strategies
        self._default_strategy = store.default_strategy
        self.hidden_size = self._drafters[""].hidden_size
        self._opened_at = datetime.now(UTC)

    def __str__(self) -> str:
        return f"{self.name!r} from build {self.build:016x}"

    def draft(self, request: DraftRequest) -> DraftBatch:
        """Draft for the contexts of a request; thread-safe.

        StoreError if a file of the store was truncated, since reading past its end would kill the process.
        """
        drafter = self._drafters[request.strategy]
        damage = self._files.check()
        if damage is not None:
            raise StoreError(damage)
        return drafter.draft_batch(request.contexts, request.budget, request.min_prob, request.hidden)

    @property
    def damage(self) -> str | None:
        """Why it no longer drafts; None if its files were intact at the last draft."""
        return self._files.damage

    def close(self) -> None:
        """Close its files and connections; no request may use it any more."""
        self._drafters.clear()
        self._opened.close()

    def describe(self) -> dict[str, Any]:
        """Return its public description as JSON values, without its path."""
        manifest = self._manifest
        return {
            "name": self.name,
            "kind": self.kind,
            "build": f"{self.build:016x}",
            "tokenizer": {"name": manifest.tokenizer.name, "fingerprint": manifest.tokenizer.fingerprint},
            "vocab_size": manifest.vocab_size,
            "target_model": manifest.target_model,
            "hidden_size": self.hidden_size or None,
            "context_size": self._drafters[""].context_size,
            "strategies": list(self.strategies),
            "default_strategy": self._default_strategy,
            "backend": self.backend,
            **{what: manifest.counts.get(what, 0) for what in ("documents", "tokens", "entries")},
            "created": manifest.created,
            "opened_at": self._opened_at.isoformat(timespec="seconds"),
        }


class ServedLive:
    """A live store with the attributes of `Served`: it drafts like a store and accepts what decoders append."""

    kind, backend, slow, hidden_size, pace, build = "live", "memory", False, 0, PACE, 0
    strategies = tuple(RULES)
    text = damage = None

    def __init__(self, target: LiveTarget) -> None:
        """Read its log; DraftstoreError if that fails."""
        self.name = target.name
        self.store = LiveStore(target.tokens, target.folder)
        self._drafters: dict[str, MemoryDrafter] = {}
        self._opened_at = datetime.now(UTC)

    @property
    def tokenizer(self) -> int:
        """Fingerprint of the tokenizer, as sent in answers; 0 while unknown."""
        found = self.store.vocabulary
        return short_hash(found.fingerprint) if found else 0

    def append(self, request: AppendRequest) -> dict[str, Any]:
        """Append documents; thread-safe. DraftstoreError if they have another vocabulary, or an id outside it."""
        vocabulary = Vocabulary(request.vocab_size, request.fingerprint)
        documents = [document for document in request.documents if len(document.ids)]
        if documents:
            self.store.agree(vocabulary)
            for strategy in RULES:  # now: later a draft would wait for an append
                self._drafter(strategy)
            self.store.append(documents)
        else:
            self.store.check(vocabulary)
        return {"appended": len(documents), "tokens": len(self.store)}

    def draft(self, request: DraftRequest) -> DraftBatch:
        """Draft for the contexts of a request; thread-safe."""
        if self.store.vocabulary is None:  # nothing has been appended yet
            return DraftBatch.empty(len(request.contexts))
        drafter = self._drafter(request.strategy or DEFAULT)
        return drafter.draft_batch(request.contexts, request.budget, request.min_prob)

    def _drafter(self, strategy: str) -> MemoryDrafter:
        if strategy not in self._drafters:
            self._drafters[strategy] = self.store.drafter(strategy)
        return self._drafters[strategy]

    def describe(self) -> dict[str, Any]:
        """Return its public description as JSON values."""
        found = self.store.vocabulary
        return {
            "name": self.name,
            "kind": self.kind,
            "build": f"{self.build:016x}",
            "tokenizer": {"name": None, "fingerprint": found.fingerprint if found else None},
            "vocab_size": found.size if found else None,
            "target_model": None,
            "hidden_size": None,
            "context_size": CONTEXT_SIZE,
            "strategies": list(self.strategies),
            "default_strategy": DEFAULT,
            "backend": self.backend,
            "documents": self.store.appended,
            "tokens": len(self.store),
            "entries": len(self.store),
            "created": None,
            "opened_at": self._opened_at.isoformat(timespec="seconds"),
        }

    def close(self) -> None:
        """Close its log."""
        self.store.close()


Serving: TypeAlias = Served | ServedLive
"""A store that answers under a name."""


def _require_digest(target: Target, expected: str | None) -> str:
    digest = manifest_digest(target.path)
    if expected not in (None, digest):
        raise StoreError(
            f"{target.path} now holds another store (manifest {digest[:12]}, expected {str(expected)[:12]}): "
            "publish the build found there, or rebuild the expected one"
        )
    return digest


def _tokenizer(target: Target, manifest: Manifest, loaded: Iterable[TextTokenizer]) -> TextTokenizer:
    """Return the tokenizer of a store, one that is already loaded if possible."""
    for text in loaded:
        if text.fingerprint == manifest.tokenizer.fingerprint:
            return text
    text = load_tokenizer(target.path / TOKENIZER_FOLDER, name=manifest.tokenizer.name)
    manifest.require_tokenizer(text.identity, target.path)
    return text


def warm_store(store: Store, drafters: Iterable[ContextDrafter]) -> float:
    """Warm a store; return the seconds that its slowest drafter takes for a context in a batch."""
    warm_files(store.path / name for name in store.manifest.files)
    batch.warm_up()
    contexts, hidden = store.samples(SAMPLES)
    slowest = 0.0
    for drafter in drafters:
        drafter.warm_up()
        for rows in (*(slice(row, row + 1) for row in range(len(contexts))), slice(None)):
            begin = time.perf_counter()
            drafter.draft_batch(
                contexts[rows], hidden=None if hidden is None else hidden[rows]
            ).encode_trees()
            seconds = time.perf_counter() - begin
            time.sleep(REST)
        slowest = max(slowest, seconds)
    return slowest / max(len(contexts), 1)


def warm_files(paths: Iterable[Path], most: int | None = None) -> int:
    """Read files into memory, small ones first; return the bytes read."""
    left = most = int(available_memory() * SHARE) if most is None else most
    for path in sorted(paths, key=lambda path: path.stat().st_size):
        with path.open("rb", buffering=0) as file:
            while data := file.read(min(PIECE, left)):
                left -= len(data)
                time.sleep(REST)
    return most - left


def available_memory() -> int:
    """Return the bytes that can be filled without evicting other pages."""
    _, _, rest = Path("/proc/meminfo").read_text(encoding="ascii").partition("MemAvailable:")
    return int(rest.split()[0]) * 1024


def load_kernels() -> None:
    """Compile all lookup kernels or load them from numba's cache, which holds the GIL for a tenth of a second."""
    LOG.info(LOADING_KERNELS)
    steps = {"trees": batch.warm_up, "live": memory.warm_up}
    steps |= {name: kind_of(name).load_kernels for name in KINDS}
    for name, load in steps.items():
        begin = time.perf_counter()
        load()
        if (seconds := time.perf_counter() - begin) > 1:
            LOG.info("compiled the kernels of %s in %.0f s", name, seconds)
