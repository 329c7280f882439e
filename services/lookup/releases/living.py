"""A live store in the service: it drafts like a store and accepts what decoders append."""

from datetime import UTC, datetime
from typing import Any

from draftstore.live.log import Document, Vocabulary
from draftstore.live.memory import CONTEXT_SIZE, DEFAULT, RULES, MemoryDrafter
from draftstore.live.store import LiveStore, LiveTarget
from draftstore.remote.wire import AppendRequest, DraftRequest, short_hash
from draftstore.trees.batch import DraftBatch

PACE = 2e-4
"""Seconds of a draft of 64 nodes for one context."""


class Living:
    """A live store under its name, with the attributes of `releases.served.Served`."""

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
        digests = request.digests or [b""] * len(request.documents)
        pairs = zip(request.documents, digests, strict=True)
        documents = [Document(*document, digest) for document, digest in pairs if len(document[0])]
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
