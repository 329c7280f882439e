"""Text to token shards: a corpus is tokenized once, in batches on all cores, resumable after every shard."""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from draftstore.errors import CorpusError, NoTextError, StoreError, TokenRangeError
from draftstore.storage.files import fsync_path, write_json
from draftstore.storage.manifest import FileEntry
from draftstore.text.digests import text_digest
from draftstore.text.records import Document
from draftstore.text.tokenizer import TextTokenizer
from draftstore.text.tokens import (
    FORMAT_VERSION,
    OFFSET_DTYPE,
    STATE_NAME,
    Shard,
    TokenShards,
    open_shards,
    read_marker,
    require_files,
    shard_path,
    token_dtype,
    totals_of,
)

SHARD_TOKENS = 4_000_000
BATCH_CHARACTERS = 1_000_000
PIECE_CHARACTERS = 1 << 17
"""Maximum characters of a piece: BPE without a pre-tokenizer slows down with length, and pieces run in parallel."""

Progress: TypeAlias = Callable[[int, int, int], None]


class HasId(Protocol):
    """A document known by its id."""

    @property
    def id(self) -> str:
        """Its id."""


Named = TypeVar("Named", bound=HasId)


def tokenize_corpus(
    documents: Iterator[Document],
    tokenizer: TextTokenizer,
    directory: Path,
    *,
    corpus_fingerprint: str,
    source: str = "the corpus",
    shard_tokens: int = SHARD_TOKENS,
    batch_chars: int = BATCH_CHARACTERS,
    on_progress: Progress = lambda _documents, _tokens, _chars: None,
) -> TokenShards:
    """Write a corpus as token shards, or resume an interrupted call.

    A shard ends with the document that fills it, so shards depend only on the documents, not on batches, cores or
    interruptions. A document above `PIECE_CHARACTERS` is encoded in pieces, cut at a line break or space if possible:
    one or two ids at each cut can differ from those of the whole text. Memory holds two batches and one document's
    text, whatever the size of the corpus. Reading runs one batch ahead, in a thread.

    Args:
        documents: always the same documents in the same order for the same `corpus_fingerprint`; those of finished
            shards are skipped; unused if the directory is complete.
        tokenizer: its ids are used without BOS and EOS.
        directory: created if missing; shards in it from another tokenizer, corpus or shard size are removed. One
            process at a time (`files.locked_directory`).
        corpus_fingerprint: identity of the corpus and of how it is read (`corpus.corpus_fingerprint`).
        source: name of the corpus in errors.
        shard_tokens: number of tokens at which a shard ends.
        batch_chars: characters encoded at a time.
        on_progress: called at the start and after each batch with all documents, tokens and characters so far.

    Raises:
        NoTextError: the corpus has no token; documents without any can be opened (`open_shards`).
        CorpusError: the documents differ from those of an interrupted call.
        TokenRangeError: the tokenizer returned an id outside its vocabulary.
    """

    def encode(left: Iterator[Document]) -> Iterator[list[Encoded]]:
        for batch in _read_ahead(_batches(left, batch_chars)):
            encoded = tokenizer.encode_documents([piece.text for piece in batch])
            yield [
                Encoded(piece.document_id, len(piece.text), ids, piece.digest)
                for piece, ids in zip(batch, encoded, strict=True)
            ]

    return write_shards(
        documents, encode, tokenizer, directory,
        corpus_fingerprint=corpus_fingerprint, source=source, shard_tokens=shard_tokens, on_progress=on_progress,
    )  # fmt: skip


class Encoded(NamedTuple):
    """Token ids of a document, or of a piece of it.

    Attributes:
        id: the document's.
        characters: length of the text.
        ids: integers [n].
        digest: the document's, 16 bytes; None: there are more pieces of it.
    """

    id: str
    characters: int
    ids: NDArray[np.integer[Any]]
    digest: bytes | None


def write_shards(
    documents: Iterator[Named],
    encode: Callable[[Iterator[Named]], Iterator[Sequence[Encoded]]],
    tokenizer: TextTokenizer,
    directory: Path,
    *,
    corpus_fingerprint: str,
    source: str,
    shard_tokens: int = SHARD_TOKENS,
    on_progress: Progress = lambda _documents, _tokens, _chars: None,
) -> TokenShards:
    """Write documents as token shards: `tokenize_corpus`, whose errors it raises, with any source of the token ids."""
    state = {
        "format_version": FORMAT_VERSION,
        "vocab_size": tokenizer.vocab_size,
        "tokenizer": dataclasses.asdict(tokenizer.identity),
        "corpus_fingerprint": corpus_fingerprint,
        "shard_tokens": shard_tokens,
    }
    directory.mkdir(parents=True, exist_ok=True)
    finished, shards = _resume(directory, state)
    if not finished:
        _skip(documents, shards, source)
        writer = _Writer(directory, tokenizer.vocab_size, shard_tokens, shards)
        try:
            on_progress(writer.documents, writer.tokens, writer.characters)
            for batch in encode(documents):
                for piece in batch:
                    writer.add(piece)
                on_progress(writer.documents, writer.tokens, writer.characters)
            writer.finish_shard()
        except BaseException:
            writer.discard()
            raise
        write_json(
            directory / STATE_NAME,
            state | {"shards": len(writer.shards), "totals": totals_of(writer.shards)},
        )
    made = open_shards(directory)
    if made.token_count == 0:
        raise NoTextError(f"no text found in {source}")
    return made


@dataclasses.dataclass(frozen=True)
class _Piece:
    """A document's text, or a part of it; the last one has the document's digest."""

    document_id: str
    text: str
    digest: bytes | None


class _Writer:
    """Appends documents to the current shard and finishes it when full."""

    def __init__(self, directory: Path, vocab_size: int, shard_tokens: int, shards: list[Shard]) -> None:
        self.shards = shards
        self.documents = sum(shard.documents for shard in shards)
        self.tokens = sum(shard.tokens for shard in shards)
        self.characters = sum(shard.characters for shard in shards)
        self._directory = directory
        self._vocab_size = vocab_size
        self._dtype = token_dtype(vocab_size)
        self._shard_tokens = shard_tokens
        self._start_shard()

    def _start_shard(self) -> None:
        self._file = shard_path(self._directory, len(self.shards), "tokens").open("wb")
        self._digest = hashlib.sha256()
        self._offsets = [0]
        self._digests = bytearray()
        self._size = 0
        self._characters = 0
        self._first_id = ""

    def add(self, piece: Encoded) -> None:
        """Append the next piece of a document."""
        ids = piece.ids
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self._vocab_size:
            raise TokenRangeError(
                f"document {piece.id!r} gave ids {ids.min():,} to {ids.max():,}, "
                f"expected 0 to {self._vocab_size - 1:,}"
            )
        data = ids.astype(self._dtype).tobytes()
        self._file.write(data)
        self._digest.update(data)
        if len(self._offsets) == 1:
            self._first_id = piece.id
        self._size += len(ids)
        self._characters += piece.characters
        self.tokens += len(ids)
        self.characters += piece.characters
        if piece.digest is not None:
            self._offsets.append(self._size)
            self._digests += piece.digest
            self.documents += 1
            self._last_id = piece.id
            if self._size >= self._shard_tokens:
                self.finish_shard()
                self._start_shard()

    def finish_shard(self) -> None:
        """Flush the shard to disk and mark it as finished; an empty one is removed."""
        index = len(self.shards)
        tokens_path = Path(self._file.name)
        self._file.close()
        if len(self._offsets) == 1:
            tokens_path.unlink()
            return
        offsets_path, digests_path = (
            shard_path(self._directory, index, name) for name in ("offsets", "digests")
        )
        offsets_path.write_bytes(np.array(self._offsets, dtype=OFFSET_DTYPE).tobytes())
        digests_path.write_bytes(self._digests)
        for path in (tokens_path, offsets_path, digests_path):
            fsync_path(path)
        shard = Shard(
            documents=len(self._offsets) - 1,
            tokens=self._size,
            characters=self._characters,
            first_id=self._first_id,
            last_id=self._last_id,
            files={
                tokens_path.name: FileEntry(self._size * self._dtype.itemsize, self._digest.hexdigest()),
                offsets_path.name: FileEntry.of(offsets_path),
                digests_path.name: FileEntry.of(digests_path),
            },
        )
        write_json(shard_path(self._directory, index, "json"), dataclasses.asdict(shard))
        self.shards.append(shard)

    def discard(self) -> None:
        """Remove the files of the current shard."""
        with suppress(OSError):  # on a full disk closing fails like writing
            self._file.close()
        for suffix in ("tokens", "offsets", "digests"):
            shard_path(self._directory, len(self.shards), suffix).unlink(missing_ok=True)


def _read_ahead(batches: Iterator[list[_Piece]]) -> Iterator[list[_Piece]]:
    """Yield the batches, reading the next one in a thread during work on the current one."""
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="corpus") as pool:
        future = pool.submit(next, batches, None)
        while (batch := future.result()) is not None:
            future = pool.submit(next, batches, None)
            yield batch


def _batches(documents: Iterator[Document], batch_chars: int) -> Iterator[list[_Piece]]:
    """Group documents, split if long, into lists of about `batch_chars` characters."""
    batch: list[_Piece] = []
    size = 0
    for document in documents:
        for text, last in split_text(document.text, PIECE_CHARACTERS):
            batch.append(_Piece(document.id, text, text_digest(document.text) if last else None))
            size += len(text)
            if size >= batch_chars:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def split_text(text: str, limit: int) -> Iterator[tuple[str, bool]]:
    """Yield `(piece, is the last)`: pieces of at most `limit` characters that join to the text.

    A piece ends after the last line break of its second half, else before the last space there, else at the limit.
    """
    start = 0
    while len(text) - start > limit:
        middle, end = start + max(limit // 2, 1), start + limit
        cut = text.rfind("\n", middle, end) + 1 or max(text.rfind(" ", middle, end), 0) or end
        yield text[start:cut], False
        start = cut
    yield text[start:], True


def _resume(directory: Path, state: dict[str, Any]) -> tuple[bool, list[Shard]]:
    """Return whether the directory is complete, and its valid shards; remove all others."""
    path = directory / STATE_NAME
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        same = {key: found.get(key) for key in state} == state
    except (OSError, ValueError, AttributeError):
        found, same = {}, False
    shards: list[Shard] = []
    while same:
        try:
            shard = read_marker(directory, len(shards))
            require_files(directory, shard)
        except StoreError:
            break
        shards.append(shard)
    if same and "totals" in found and found["totals"] == totals_of(shards):
        return True, shards
    write_json(path, state)
    kept = {shard_path(directory, index, "json").stem for index in range(len(shards))}
    for old in directory.glob("shard-*.*"):
        if old.stem not in kept:
            old.unlink()
    return False, shards


def _skip(documents: Iterator[HasId], shards: list[Shard], source: str) -> None:
    """Skip the documents of finished shards."""
    for shard in shards:
        ids = [document.id for document in islice(documents, shard.documents)]
        if len(ids) != shard.documents or (ids[0], ids[-1]) != (shard.first_id, shard.last_id):
            raise CorpusError(
                f"{source} changed since the build was interrupted (documents {shard.first_id!r} to "
                f"{shard.last_id!r} are not where they were): remove the unfinished shards and start again"
            )
