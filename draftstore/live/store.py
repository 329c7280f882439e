"""A live store: documents available for drafts from the next request on, in memory or also in a shared log.

    live = LiveStore(tokens=1_000_000, folder=Path("live/chat"))
    live.agree(Vocabulary(32_000, fingerprint))
    live.append([LiveDocument(ids, digest=identify(messages).document)])
    live.drafter("sole").draft(contexts)

A thread follows the folder: four times a second it reads the documents that other processes appended, and forgets those
that were taken down or are now in a published store.
"""

import logging
import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import filterfalse
from pathlib import Path
from time import monotonic
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from draftstore.drafting.drafter import check_ids
from draftstore.errors import DraftstoreError, TokenizerError, TokenRangeError, require_limits
from draftstore.live.directory import Cursor
from draftstore.live.log import (
    LIVE,
    LiveDocument,
    Writer,
    answers_of,
    begun,
    drop_oldest,
    erase,
    is_open,
    read_since,
    segments,
)
from draftstore.live.memory import TOKENS, Memory, MemoryDrafter
from draftstore.live.removing import TakeDowns, last_change
from draftstore.live.shared import Vocabulary, agree, change, settings_of
from draftstore.live.source import identified, tokenizer_of
from draftstore.options import NAME
from draftstore.storage.manifest import TOKENIZER_FOLDER
from draftstore.text.tokenizer import TextTokenizer

LOG = logging.getLogger(__name__)
FOLLOW_SECONDS = 0.25
WARN_SECONDS = 60.0
UNLOGGED = 1000
"""Maximum documents that could not be logged but are kept when memory is reloaded from the log."""
_TARGET = re.compile(rf"({NAME})(?:=(.+?))?(?::(\d{{1,10}}))?")
MAX_VERSION = (1 << 32) - 1
LEAST_TOKENS = 1024
"""Tokens of the smallest memory."""


class LiveStore:
    """Documents in memory and, given a folder, in a log; thread-safe.

    Attributes:
        vocabulary: that of its documents, which the first one sets in the log; None while unknown.
        appended: number of documents that this process appended.
        refused: number of documents not appended because they had been taken down.
        unlogged: number of appended documents that could not be logged.
    """

    def __init__(self, tokens: int = TOKENS, folder: Path | None = None) -> None:
        """Read the log, and follow it.

        Args:
            tokens: maximum tokens in memory; the oldest are evicted first.
            folder: folder of the log, created if necessary; None: memory only, lost when the process ends.

        Raises:
            DraftstoreError: the folder cannot be used, or its log is of an earlier version.
        """
        self._tokens = tokens
        self.vocabulary: Vocabulary | None = None
        self.appended = self.refused = self.unlogged = 0
        self._drafters: list[MemoryDrafter] = []
        self._memory: Memory | None = None
        self._lock = threading.Lock()  # for the following fields and the writer
        self._following = threading.Lock()  # for a whole look at the folder
        self._agreed = False  # whether the log has this vocabulary
        self._seen: dict[Path, int] = {}
        self._sizes: dict[Path, int] = {}  # at the last look: a damaged end is searched once
        self._own: set[Path] = set()  # segments of this process
        self._loaded = False
        self._unread: list[LiveDocument] | None = None  # appended while the log is reloaded
        self._rules, self._change = TakeDowns(), tuple[int, ...]()
        self._version = 0  # the newest of a document
        self._least = 0  # the oldest that is not forgotten
        self._reloads = 0
        self._tokenizer: TextTokenizer | None = None
        self._unlogged: list[LiveDocument] = []  # the latest documents that could not be logged
        self._warned = -WARN_SECONDS
        self._writer: Writer | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        if folder is not None:
            settings_of(folder)  # before anything is written: it may be of an earlier version
            TakeDowns.read(folder)
            try:
                self._writer = Writer(folder, tokens)
            except OSError as error:
                raise DraftstoreError(f"the live log {folder} cannot be written: {error.strerror}") from None
            self.follow()
            self._thread = threading.Thread(target=self._run, name="live-log", daemon=True)
            self._thread.start()

    def __len__(self) -> int:
        """Return the number of tokens in memory."""
        return 0 if self._memory is None else len(self._memory)

    def agree(self, vocabulary: Vocabulary) -> None:
        """Declare the vocabulary of the ids; TokenizerError if the store has another one.

        The log has that of its first document: until then, one that was declared by mistake ends with its process.
        """
        self.check(vocabulary)
        with self._lock:
            self._begin(vocabulary)
        self.check(vocabulary)  # another thread may have been first

    def check(self, vocabulary: Vocabulary) -> None:
        """Raise a TokenizerError if the store has another vocabulary."""
        found = self.vocabulary if self._agreed or len(self) else None
        found = found or (settings_of(self._writer.folder).vocabulary if self._writer else None)
        if found and found != vocabulary:
            raise _mismatch(found, vocabulary)

    def append(self, documents: Sequence[LiveDocument]) -> None:
        """Append documents, first to the log, then to memory, except those that were taken down or are forgotten.

        Nothing is appended if an id is outside the vocabulary (TokenRangeError), or if another process has appended
        documents of another vocabulary (TokenizerError), or if a version is not 0 .. 2 ** 32 - 1 (DraftstoreError).
        """
        assert self._memory is not None, "agree first"
        for document in documents:
            check_ids(document.ids, self._memory.vocab_size)
            _check_version(document.version)
        with self._lock:
            if self._tokenizer is not None:
                documents = [identified(document, self._tokenizer) for document in documents]
            self._version = max([self._version, self._least, *(document.version for document in documents)])
            dated = [each._replace(version=each.version or self._version) for each in documents]
            taken = list(filterfalse(self._refuses, dated))
            logged = self._log(taken)
            self.refused += len(documents) - len(taken)
            self.appended += len(taken)
            if not logged:
                self._unlogged = self._unlogged[-UNLOGGED:] + taken
                self.unlogged += len(taken)
            elif self._unread is not None:
                self._unread += taken
            for document in taken:
                self._memory.append(document.ids, document.prompt, document.version)

    def append_many(
        self,
        prompt: NDArray[np.integer],
        answers: Iterable[ArrayLike],
        version: int = 0,
        digests: Sequence[bytes] = (),
    ) -> None:
        """Append answers to one prompt, such as rollouts; see `append` for errors.

        Args:
            prompt: int [any], ids of the whole prompt.
            answers: int [any] each.
            version: version of the model, of which the newest answers are recalled; 0: the newest one known.
            digests: 16 bytes that identify each document (`draftstore.text.digests`); empty: unknown.
        """
        self.append(answers_of(prompt, answers, version, digests))

    def forget(self, *, before: int) -> None:
        """Forget documents of versions before one, now and later, also in the log; DraftstoreError if that fails.

        Other processes that use the log forget them within a second.
        """
        _check_version(max(0, before))
        if self._writer is None:
            with self._lock:
                self._least = max(self._least, before)
                if self._memory is not None:
                    self._replace(self._memory.newer(self._least))
            return
        folder = self._writer.folder
        try:
            change(folder, lambda found: found._replace(least=max(found.least, before)))
            self.follow()
            for path in segments(folder):
                erase(path, lambda document: document.version < before)
        except OSError as error:
            raise DraftstoreError(f"the live log {folder} cannot be written: {error.strerror}") from None

    def recall(self, prompt: int, count: int) -> list[NDArray[np.int32]]:
        """Return the latest answers to a prompt, by its hash, newest version last; see `draftstore.live.recall`."""
        return [] if self._memory is None else self._memory.recall(prompt, count)

    def changed(self, since: Cursor) -> tuple[Cursor, set[int] | None]:
        """Return a cursor, and the prompts with new answers since another; None: any may have changed."""
        reloads, memory = self._reloads, self._memory
        number, prompts = (0, set[int]()) if memory is None else memory.changed(since[1])
        return (reloads, number), prompts if since[0] == reloads else None

    def _log(self, documents: list[LiveDocument]) -> bool:
        """Write documents to the log, if there is one; return False if that fails."""
        if self._writer is None or not documents:
            return True
        assert self.vocabulary is not None
        try:
            self._stay(self._writer)
            if not self._agreed and (found := agree(self._writer.folder, self.vocabulary)) != self.vocabulary:
                raise _mismatch(found, self.vocabulary)
            self._agreed = True
            self._writer.append(documents)
        except TokenizerError:
            raise
        except (OSError, DraftstoreError) as error:
            self._warn("the log of a live store cannot be written, continuing in memory: %s", error)
            return False
        return True

    def _stay(self, writer: Writer) -> None:
        """Begin a new segment if the current one is not in its folder any more; OSError if that is gone."""
        if not writer.in_place:
            writer.reopen()
            LOG.warning("the live log %s was moved, removed or replaced: a new segment begins", writer.folder)
            self._agreed, self._loaded, self._own = False, False, set()

    def drafter(self, strategy: str) -> MemoryDrafter:
        """Return a drafter that uses the content of memory at the time of each draft."""
        assert self._memory is not None, "agree first"
        with self._lock:
            drafter = MemoryDrafter(self._memory, strategy)
            self._drafters.append(drafter)
        return drafter

    def follow(self) -> None:
        """Apply changes that other processes made in the folder."""
        with self._following:
            self._follow()

    def _follow(self) -> None:
        assert self._writer is not None
        writer, folder = self._writer, self._writer.folder
        with self._lock:
            self._stay(writer)
        if (latest := last_change(folder)) != self._change:
            rules, least = TakeDowns.read(folder), settings_of(folder).least
            known = rules.state or (folder / TOKENIZER_FOLDER).exists()
            tokenizer = tokenizer_of(folder) if known else None
            with self._lock:
                self._loaded &= (rules.state, least) == (self._rules.state, self._least)
                self._rules, self._tokenizer, self._least = rules, tokenizer, least
            self._change = latest
        found = self.vocabulary if self._agreed else settings_of(folder).vocabulary
        with self._lock:
            if found and self.vocabulary is None:
                self._begin(found)
            self._agreed = found is not None and found == self.vocabulary
            if self.vocabulary is None:  # memory is empty
                writer.apply(self._rules.state)
                return
            writer.roll()
        drop_oldest(folder)
        present = segments(folder, LIVE) if found in (None, self.vocabulary) else []
        gone = (self._seen.keys() | self._own) - {*present}
        self._own = (self._own | {writer.path}) & {*present}
        self._loaded &= not gone
        if self._loaded:
            self._read_new(present)
        else:
            self._reload(writer, present)
        with self._lock:
            writer.apply(self._rules.state)

    def close(self) -> None:
        """Stop following, and close the log."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        if self._writer is not None:
            with self._lock:
                self._writer.close()

    def _begin(self, vocabulary: Vocabulary) -> None:
        """Set the vocabulary, and begin with an empty memory; one without documents may be set again."""
        if self.vocabulary is None or not (self.vocabulary == vocabulary or self._agreed or len(self)):
            self._replace(Memory(vocabulary.size, self._tokens))
            self.vocabulary = vocabulary

    def _replace(self, memory: Memory) -> None:
        self._memory = memory
        self._reloads += 1
        for drafter in self._drafters:
            drafter.memory, drafter.vocab_size = memory, memory.vocab_size

    def _refuses(self, document: LiveDocument) -> bool:
        if document.version < self._least:
            return True
        return self._tokenizer is not None and self._rules.refuse(document, self._tokenizer)

    def _read_new(self, present: Sequence[Path]) -> None:
        assert self._memory is not None
        for path in present:
            with suppress(FileNotFoundError):
                size = path.stat().st_size
                if path not in self._own and size != self._sizes.get(path):
                    documents, self._seen[path] = read_since(path, self._seen.get(path, 0))
                    self._sizes[path] = size
                    for document in filterfalse(self._refuses, documents):
                        with self._lock:
                            self._take(self._memory, document)

    def _reload(self, writer: Writer, present: Sequence[Path]) -> None:
        """Reload memory from the log, from the newest segment back until it is full."""

        def forgotten(document: LiveDocument) -> bool:
            with self._lock:
                writer.beat()
            return self._refuses(document)

        assert self._memory is not None
        own = writer.path
        with self._lock:
            self._unread, stop = [], writer.size
        if self._rules.state or self._least:  # documents appended here after they were removed elsewhere
            for path in self._own:
                erase(path, forgotten)
        documents: list[tuple[float, str, LiveDocument]] = []
        seen: dict[Path, int] = {}
        room = self._tokens
        for path in reversed(present):
            with suppress(FileNotFoundError):
                if room <= 0 and not is_open(path):
                    seen[path] = path.stat().st_size
                    continue
                found, seen[path] = read_since(path, stop=stop if path == own else None)
                if room > 0:
                    documents += _in_order(path, found)
                    room -= sum(len(document.ids) for document in found)
        memory = Memory(self._memory.vocab_size, self._tokens)
        documents.sort(key=lambda each: each[:2])
        for document in filterfalse(forgotten, (each for *_, each in documents)):
            self._take(memory, document)
        with self._lock:
            self._unlogged = list(filterfalse(self._refuses, self._unlogged))
            for document in (*self._unlogged, *filterfalse(self._refuses, self._unread or ())):
                self._take(memory, document)
            self._replace(memory)
            self._unread, self._seen, self._sizes = None, seen, {}
        self._loaded = True

    def _take(self, memory: Memory, document: LiveDocument) -> None:
        self._version = max(self._version, document.version)
        with suppress(TokenRangeError):
            memory.append(document.ids, document.prompt, document.version)

    def _run(self) -> None:
        while not self._stop.wait(FOLLOW_SECONDS):
            try:
                self.follow()
            except Exception as error:  # noqa: BLE001 (the thread must continue)
                self._warn("the log of a live store cannot be followed: %s", error)

    def _warn(self, message: str, error: Exception) -> None:
        if monotonic() - self._warned >= WARN_SECONDS:
            self._warned = monotonic()
            LOG.warning(message, error)


def _in_order(path: Path, documents: Iterable[LiveDocument]) -> Iterator[tuple[float, str, LiveDocument]]:
    """Yield the documents of a segment, each with the time of the newest one so far, and the segment's name."""
    newest = begun(path)
    for document in documents:
        newest = max(newest, document.created)
        yield newest, path.name, document


def _check_version(version: int) -> None:
    require_limits("a live store", {"version": (version, 0, MAX_VERSION)})


def _mismatch(found: Vocabulary, wanted: Vocabulary) -> TokenizerError:
    return TokenizerError(
        f"this live store holds ids of the tokenizer {found.fingerprint[:12]} with {found.size:,} ids, found "
        f"{wanted.fingerprint[:12]} with {wanted.size:,}: use a separate live store for this model"
    )


class LiveTarget(NamedTuple):
    """A live store as options name it: its name, the folder of its log, if any, and the maximum tokens in memory.

    `NAME`, `NAME=DIR`, `NAME:TOKENS` or `NAME=DIR:TOKENS`.
    """

    name: str
    folder: Path | None = None
    tokens: int = TOKENS

    @classmethod
    def parse(cls, text: str) -> "LiveTarget":
        """Return the live store of an option; DraftstoreError if it is invalid."""
        found = _TARGET.fullmatch(text)
        if found is None or not LEAST_TOKENS <= int(found[3] or TOKENS) < 2**31:
            raise DraftstoreError(
                f"{text!r} is not a live store: expected NAME, NAME=DIR or NAME=DIR:TOKENS, such as "
                f"team=live/team:{TOKENS}, with at least {LEAST_TOKENS:,} tokens"
            )
        folder = Path(found[2]).expanduser() if found[2] else None
        return cls(found[1], folder, int(found[3] or TOKENS))
