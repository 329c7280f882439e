"""Kinds and tokenizers of the served stores, for the HTTP process; opens no store."""

import logging
from collections.abc import Iterable

from draftstore.errors import DraftstoreError
from draftstore.remote import wire
from draftstore.storage.manifest import TOKENIZER_FOLDER, load_manifest
from draftstore.text.tokenizer import TextTokenizer, load_tokenizer
from services.lookup.stores.targets import Target

LOG = logging.getLogger(__name__)


class Lexicon:
    """Tokenizers and store kinds by release; releases with the same tokenizer share it.

    `follow` may be called only by the following thread; everything else is thread-safe.
    """

    def __init__(self) -> None:
        self._keys: dict[str, int] = {}
        self._kinds: dict[str, str] = {}
        self._tokenizers: dict[int, TextTokenizer] = {}
        self._followed: dict[str, Target] = {}
        self._learned: dict[str, Target] = {}

    @property
    def names(self) -> list[str]:
        """Names that should be served."""
        return sorted(self._followed)

    def follow(self, targets: Iterable[Target]) -> None:
        """Load the tokenizers of these targets; never raises: failures are logged and retried."""
        wanted = {target.name: target for target in targets}
        keys = {name: key for name, key in self._keys.items() if name in wanted}
        self._kinds = {name: kind for name, kind in self._kinds.items() if name in wanted}
        self._learned = {name: target for name, target in self._learned.items() if name in wanted}
        for name, target in wanted.items():
            # Without a digest, a replaced build cannot be detected.
            if target.digest is None or self._learned.get(name) != target:
                try:
                    keys[name] = self._learn(target)
                    self._learned[name] = target
                except (DraftstoreError, OSError) as error:
                    if self._followed.get(name) != target:
                        LOG.warning("the tokenizer of %r cannot be read: %s", name, error)
        # Workers may still answer from earlier builds: their tokenizers stay until the next change.
        kept = {*self._keys.values(), *keys.values()}
        if keys != self._keys:
            self._tokenizers = {key: known for key, known in self._tokenizers.items() if key in kept}
        self._keys, self._followed = keys, wanted

    def _learn(self, target: Target) -> int:
        """Load the tokenizer of a store and return the short hash of its fingerprint."""
        manifest = load_manifest(target.path)
        self._kinds = {**self._kinds, target.name: manifest.kind}
        key = wire.short_hash(manifest.tokenizer.fingerprint)
        if key not in self._tokenizers:
            tokenizer = load_tokenizer(target.path / TOKENIZER_FOLDER, name=manifest.tokenizer.name)
            manifest.require_tokenizer(tokenizer.identity, target.path)
            self._tokenizers = {**self._tokenizers, key: tokenizer}
        return key

    def kind_of(self, name: str) -> str | None:
        """Return the kind of a release's store; None if unknown."""
        return self._kinds.get(name)

    def of_release(self, name: str) -> TextTokenizer | None:
        """Return the tokenizer of a release; None if unknown."""
        key = self._keys.get(name)
        return None if key is None else self._tokenizers.get(key)

    def of_answer(self, tokenizer: int) -> TextTokenizer | None:
        """Return the tokenizer with the short hash in an answer; None if unknown."""
        return self._tokenizers.get(tokenizer)
