"""Token shards: a corpus as token ids on disk, documents kept apart, written once and resumable.

A directory of shards holds, for each shard,

    shard-00000.tokens   the ids of its documents one after the other, little-endian u16 or u32
    shard-00000.offsets  int64[documents + 1]: document i is tokens[offsets[i]:offsets[i + 1]]
    shard-00000.json     the marker, written last: a shard without one does not exist

and `tokens.json`: what the ids were made with and, once every document is in, the totals.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from draftstore.corpus import Document
from draftstore.errors import CorpusError, StoreError, TokenRangeError
from draftstore.files import fsync_path, write_atomic
from draftstore.manifest import FileEntry, TokenizerIdentity
from draftstore.tokenizer import TextTokenizer

FORMAT_VERSION = 1
STATE_NAME = "tokens.json"
OFFSET_DTYPE = np.dtype("<i8")
SHARD_TOKENS = 4_000_000
BATCH_CHARACTERS = 1_000_000
PIECE_CHARACTERS = 1 << 17  # BPE without a pre-tokenizer slows down with length, and pieces run in parallel

TokenArray: TypeAlias = NDArray[np.unsignedinteger[Any]]
Progress: TypeAlias = Callable[[int, int, int], None]


def token_dtype(vocab_size: int) -> np.dtype[np.unsignedinteger[Any]]:
    """Return the little-endian type of token ids on disk: u16 up to 65,535 ids, else u32.

    The type's largest value stays free for `sentinel`.

    Raises:
        TokenRangeError: vocab_size is not within 1 .. 2**31 - 1.
    """
    if not 1 <= vocab_size < 2**31:
        raise TokenRangeError(f"a vocabulary of {vocab_size:,} ids: expected 1 to {2**31 - 1:,}")
    return np.dtype("<u2") if vocab_size <= 65_535 else np.dtype("<u4")


def sentinel(dtype: np.dtype[np.unsignedinteger[Any]]) -> int:
    """Return the value that stands between documents: the largest of the type, outside every vocabulary."""
    return int(np.iinfo(dtype).max)


@dataclasses.dataclass(frozen=True)
class Shard:
    """The marker of a finished shard.

    Attributes:
        documents: how many it holds.
        tokens: how many it holds.
        characters: length of its documents as text.
        first_id: id of its first document.
        last_id: id of its last document.
        files: size and hash of the token and the offset file, by name.
    """

    documents: int
    tokens: int
    characters: int
    first_id: str
    last_id: str
    files: dict[str, FileEntry]


@dataclasses.dataclass(frozen=True)
class TokenShards:
    """A finished directory of token shards.

    Attributes:
        directory: where it is.
        vocab_size: ids lie in [0, vocab_size).
        tokenizer: which tokenizer made the ids.
        corpus_fingerprint: identity of the corpus, as it was given to `tokenize_corpus`.
        shards: the markers, in order.
    """

    directory: Path
    vocab_size: int
    tokenizer: TokenizerIdentity
    corpus_fingerprint: str
    shards: tuple[Shard, ...]

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger[Any]]:
        """Type of the ids on disk."""
        return token_dtype(self.vocab_size)

    @property
    def document_count(self) -> int:
        """Documents in all shards."""
        return sum(shard.documents for shard in self.shards)

    @property
    def token_count(self) -> int:
        """Tokens in all shards."""
        return sum(shard.tokens for shard in self.shards)

    @property
    def character_count(self) -> int:
        """Characters of text in all shards."""
        return sum(shard.characters for shard in self.shards)

    def arrays(self) -> Iterator[tuple[TokenArray, NDArray[np.int64]]]:
        """Yield `(tokens[n], offsets[documents + 1])` of each shard, as read-only maps of its files.

        Raises:
            StoreError: a file is missing, cut or changed so that documents or ids are out of range.
        """
        for index, shard in enumerate(self.shards):
            _require_files(self.directory, shard)
            tokens = _map_file(_shard_path(self.directory, index, "tokens"), self.dtype)
            offsets = _map_file(_shard_path(self.directory, index, "offsets"), OFFSET_DTYPE)
            whole = len(offsets) == shard.documents + 1 and offsets[0] == 0 and offsets[-1] == len(tokens)
            if not whole or len(tokens) != shard.tokens or np.any(offsets[1:] < offsets[:-1]):
                raise StoreError(f"shard {index} of {self.directory} does not hold what its marker says")
            largest = int(tokens.max(initial=0))
            if largest >= self.vocab_size:
                raise StoreError(
                    f"shard {index} of {self.directory} holds id {largest:,}, "
                    f"expected below {self.vocab_size:,}"
                )
            yield tokens, offsets

    def documents(self) -> Iterator[TokenArray]:
        """Yield the ids of each document, shape [n], in reading order: read-only views of the mapped files.

        Raises:
            StoreError: as `arrays`.
        """
        for tokens, offsets in self.arrays():
            for start, end in pairwise(offsets.tolist()):
                yield tokens[start:end]


def open_shards(directory: Path) -> TokenShards:
    """Open a finished directory of token shards; sizes are checked here, contents while they are read.

    Raises:
        StoreError: no shards there, unfinished, of an unknown version, or a missing or cut file.
    """
    path = directory / STATE_NAME
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        version = state["format_version"]
        if version != FORMAT_VERSION:
            raise StoreError(
                f"{path} has format version {version!r}, expected {FORMAT_VERSION}: build it again"
            )
        if "totals" not in state:
            raise StoreError(f"{directory} is unfinished: run the build again, it goes on where it stopped")
        identity = TokenizerIdentity(**state["tokenizer"])
        count, totals = state["shards"], state["totals"]
        vocab_size, corpus = state["vocab_size"], state["corpus_fingerprint"]
    except (FileNotFoundError, NotADirectoryError):
        raise StoreError(f"{directory} holds no token shards: it has no {STATE_NAME}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise StoreError(
            f"{path} cannot be read ({error}): the shards are damaged, build them again"
        ) from None
    shards = tuple(_read_marker(directory, index) for index in range(count))
    for shard in shards:
        _require_files(directory, shard)
    if totals != _totals(shards):
        raise StoreError(
            f"the shards in {directory} hold {_totals(shards)}, expected {totals}: build them again"
        )
    return TokenShards(directory, vocab_size, identity, corpus, shards)


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
    """Write a corpus as token shards, or go on with what an earlier, interrupted call left there.

    A shard ends with the document that fills it, so shards depend on the documents alone: not on batches,
    cores or interruptions. A document above `PIECE_CHARACTERS` is encoded in pieces, cut at a line break or
    space where there is one: an id or two at each cut can differ from those of the text in one piece. Memory
    holds two batches and one document's text, whatever the size of the corpus. Reading runs one batch ahead,
    in a thread.

    Args:
        documents: the same documents in the same order for the same `corpus_fingerprint`; those of finished
            shards are read past; not touched where the directory is complete.
        tokenizer: makes the ids, without BOS and EOS.
        directory: made if absent; shards in it that were made with another tokenizer, corpus or shard size
            are removed. One process at a time (`files.locked_directory`).
        corpus_fingerprint: identity of the corpus and of how it is read (`corpus.corpus_fingerprint`).
        source: how to name the corpus in errors.
        shard_tokens: a shard ends once it holds as many.
        batch_chars: characters that are encoded at a time.
        on_progress: called after each batch, and at the start, with all documents, tokens and characters so
            far.

    Raises:
        CorpusError: no text in it, or other documents than an interrupted call saw.
        TokenRangeError: the tokenizer gave an id outside its own vocabulary.
    """
    state = {
        "format_version": FORMAT_VERSION,
        "vocab_size": tokenizer.vocab_size,
        "tokenizer": dataclasses.asdict(tokenizer.identity),
        "corpus_fingerprint": corpus_fingerprint,
        "shard_tokens": shard_tokens,
    }
    directory.mkdir(parents=True, exist_ok=True)
    finished, shards = _resume(directory, state)
    if finished:
        return open_shards(directory)
    _skip(documents, shards, source)
    writer = _Writer(directory, tokenizer.vocab_size, shard_tokens, shards)
    try:
        on_progress(writer.documents, writer.tokens, writer.characters)
        for batch in _read_ahead(_batches(documents, batch_chars)):
            encoded = tokenizer.encode_documents([piece.text for piece in batch])
            for piece, ids in zip(batch, encoded, strict=True):
                writer.add(piece, ids)
            on_progress(writer.documents, writer.tokens, writer.characters)
        writer.finish_shard()
    except BaseException:
        writer.discard()
        raise
    if writer.tokens == 0:
        raise CorpusError(f"no text found in {source}")
    state |= {"shards": len(writer.shards), "totals": _totals(tuple(writer.shards))}
    _write_json(directory / STATE_NAME, state)
    return open_shards(directory)


@dataclasses.dataclass(frozen=True)
class _Piece:
    """A document's text, or a part of it; `last` ends the document."""

    document_id: str
    text: str
    last: bool


class _Writer:
    """Appends documents to the shard in hand and finishes it when it is full."""

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
        self._file = _shard_path(self._directory, len(self.shards), "tokens").open("wb")
        self._digest = hashlib.sha256()
        self._offsets = [0]
        self._size = 0
        self._characters = 0
        self._first_id = ""

    def add(self, piece: _Piece, ids: NDArray[np.int32]) -> None:
        """Append one piece of a document, in order."""
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self._vocab_size:
            raise TokenRangeError(
                f"document {piece.document_id!r} gave ids {ids.min():,} to {ids.max():,}, "
                f"expected 0 to {self._vocab_size - 1:,}"
            )
        data = ids.astype(self._dtype).tobytes()
        self._file.write(data)
        self._digest.update(data)
        if len(self._offsets) == 1:
            self._first_id = piece.document_id
        self._size += len(ids)
        self._characters += len(piece.text)
        self.tokens += len(ids)
        self.characters += len(piece.text)
        if piece.last:
            self._offsets.append(self._size)
            self.documents += 1
            self._last_id = piece.document_id
            if self._size >= self._shard_tokens:
                self.finish_shard()
                self._start_shard()

    def finish_shard(self) -> None:
        """Flush the shard to disk and mark it as finished; one without documents is removed."""
        index = len(self.shards)
        tokens_path = Path(self._file.name)
        self._file.close()
        if len(self._offsets) == 1:
            tokens_path.unlink()
            return
        offsets_path = _shard_path(self._directory, index, "offsets")
        offsets_path.write_bytes(np.array(self._offsets, dtype=OFFSET_DTYPE).tobytes())
        for path in (tokens_path, offsets_path):
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
            },
        )
        _write_json(_shard_path(self._directory, index, "json"), dataclasses.asdict(shard))
        self.shards.append(shard)

    def discard(self) -> None:
        """Remove what is written of the shard in hand."""
        self._file.close()
        for suffix in ("tokens", "offsets"):
            _shard_path(self._directory, len(self.shards), suffix).unlink(missing_ok=True)


def _read_ahead(batches: Iterator[list[_Piece]]) -> Iterator[list[_Piece]]:
    """Yield the same batches, reading the next one in a thread while one is worked on."""
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="corpus") as pool:
        future = pool.submit(next, batches, None)
        while (batch := future.result()) is not None:
            future = pool.submit(next, batches, None)
            yield batch


def _batches(documents: Iterator[Document], batch_chars: int) -> Iterator[list[_Piece]]:
    """Group documents, long ones cut, into lists of about `batch_chars` characters."""
    batch: list[_Piece] = []
    size = 0
    for document in documents:
        for text, last in split_text(document.text, PIECE_CHARACTERS):
            batch.append(_Piece(document.id, text, last))
            size += len(text)
            if size >= batch_chars:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def split_text(text: str, limit: int) -> Iterator[tuple[str, bool]]:
    """Yield `(piece, is the last)`: pieces of at most `limit` characters that join to the text.

    A piece ends after the last line break of its second half, else before the last space there, else at the
    limit.
    """
    start = 0
    while len(text) - start > limit:
        middle, end = start + max(limit // 2, 1), start + limit
        cut = text.rfind("\n", middle, end) + 1 or max(text.rfind(" ", middle, end), 0) or end
        yield text[start:cut], False
        start = cut
    yield text[start:], True


def _resume(directory: Path, state: dict[str, Any]) -> tuple[bool, list[Shard]]:
    """Return whether the directory is complete, and the shards in it that can stay; remove all others."""
    path = directory / STATE_NAME
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        same = {key: found.get(key) for key in state} == state
    except (OSError, ValueError, AttributeError):
        found, same = {}, False
    shards: list[Shard] = []
    while same:
        try:
            shard = _read_marker(directory, len(shards))
            _require_files(directory, shard)
        except StoreError:
            break
        shards.append(shard)
    if same and "totals" in found and found["totals"] == _totals(tuple(shards)):
        return True, shards
    _write_json(path, state)
    kept = {_shard_path(directory, index, "json").stem for index in range(len(shards))}
    for old in directory.glob("shard-*.*"):
        if old.stem not in kept:
            old.unlink()
    return False, shards


def _skip(documents: Iterator[Document], shards: list[Shard], source: str) -> None:
    """Read past the documents of finished shards.

    Raises:
        CorpusError: they are not the same any more.
    """
    for shard in shards:
        ids = [document.id for document in islice(documents, shard.documents)]
        if len(ids) != shard.documents or (ids[0], ids[-1]) != (shard.first_id, shard.last_id):
            raise CorpusError(
                f"{source} changed since the build was interrupted (documents {shard.first_id!r} to "
                f"{shard.last_id!r} are not where they were): remove the unfinished shards and start again"
            )


def _shard_path(directory: Path, index: int, suffix: str) -> Path:
    return directory / f"shard-{index:05d}.{suffix}"


def _read_marker(directory: Path, index: int) -> Shard:
    path = _shard_path(directory, index, "json")
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        files = {name: FileEntry(**entry) for name, entry in fields["files"].items()}
        return Shard(**{**fields, "files": files})
    except FileNotFoundError:
        raise StoreError(f"{path} is missing: the shards are damaged, build them again") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StoreError(
            f"{path} cannot be read ({error}): the shards are damaged, build them again"
        ) from None


def _require_files(directory: Path, shard: Shard) -> None:
    """Refuse a shard of which a file is missing or of another size than its marker says."""
    for name, entry in shard.files.items():
        path = directory / name
        found = path.stat().st_size if path.is_file() else None
        if found != entry.size:
            have = "is missing" if found is None else f"has {found:,} bytes"
            raise StoreError(f"{path} {have}, expected {entry.size:,} bytes: build the shards again")


def _map_file(path: Path, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Map a file of numbers for reading; an empty file cannot be mapped and gives an empty array."""
    if path.stat().st_size == 0:
        return np.empty(0, dtype=dtype)
    return np.memmap(path, dtype=dtype, mode="r").view(np.ndarray)


def _totals(shards: tuple[Shard, ...]) -> dict[str, int]:
    return {
        key: sum(getattr(shard, key) for shard in shards) for key in ("documents", "tokens", "characters")
    }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    write_atomic(path, (json.dumps(value, indent=2, sort_keys=True) + "\n").encode())
