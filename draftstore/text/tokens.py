"""Token shards: a corpus as token ids on disk, split into documents (written by `draftstore.text.tokenizing`).

A directory of shards contains, for each shard,

    shard-00000.tokens   the ids of its documents, concatenated, little-endian u16 or u32
    shard-00000.offsets  int64[documents + 1]: document i is tokens[offsets[i]:offsets[i + 1]]
    shard-00000.digests  uint8[documents, 16]: the digests of its documents (draftstore.text.digests)
    shard-00000.json     the marker, written last: a shard without one does not exist

and `tokens.json`: the origin of the ids and, once every document is included, the totals.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter
from pydantic.dataclasses import dataclass

from draftstore.errors import StoreError, TokenRangeError, counted, require_vocabulary
from draftstore.storage.files import (
    AnyText,
    fsync_path,
    link_or_copy,
    load_json,
    map_or_empty,
    replacing,
    write_json,
)
from draftstore.storage.manifest import FileEntry, TokenizerIdentity, size_problems
from draftstore.storage.report import OnProgress
from draftstore.text.digests import DIGEST_BYTES

STATE_NAME = "tokens.json"
OFFSET_DTYPE = np.dtype("<i8")

TokenArray: TypeAlias = NDArray[np.unsignedinteger[Any]]


def token_dtype(vocab_size: int) -> np.dtype[np.unsignedinteger[Any]]:
    """Return the little-endian type of token ids on disk; its largest value is reserved for `sentinel`.

    TokenRangeError if `vocab_size` is outside 1 .. 2**31 - 1.
    """
    require_vocabulary(vocab_size)
    return np.dtype("<u2") if vocab_size <= 65_535 else np.dtype("<u4")


def sentinel(dtype: np.dtype[np.unsignedinteger[Any]]) -> int:
    """Return the separator of documents: the largest value of the type, outside every vocabulary."""
    return int(np.iinfo(dtype).max)


@dataclass(frozen=True)
class Shard:
    """The marker of a finished shard: its counts, the ids of its first and last documents, and its other files."""

    documents: int
    tokens: int
    characters: int
    first_id: AnyText
    last_id: AnyText
    files: dict[str, FileEntry]


@dataclass(frozen=True)
class State:
    """The origin of the ids in a directory; the number of shards and the totals once every document is included."""

    vocab_size: int
    tokenizer: TokenizerIdentity
    corpus_fingerprint: AnyText
    shard_tokens: int
    shards: int | None = None
    totals: dict[str, int] | None = None
    format_version: Literal[2] = 2


MARKERS, STATES = TypeAdapter(Shard), TypeAdapter(State)


@dataclasses.dataclass(frozen=True)
class TokenShards:
    """A finished directory of token shards with their markers in order; ids are in [0, vocab_size)."""

    directory: Path
    vocab_size: int
    shards: tuple[Shard, ...]

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger[Any]]:
        """Type of the ids on disk."""
        return token_dtype(self.vocab_size)

    @property
    def document_count(self) -> int:
        """Number of documents in all shards."""
        return sum(shard.documents for shard in self.shards)

    @property
    def token_count(self) -> int:
        """Number of tokens in all shards."""
        return sum(shard.tokens for shard in self.shards)

    @property
    def character_count(self) -> int:
        """Number of characters of text in all shards."""
        return sum(shard.characters for shard in self.shards)

    def arrays(self) -> Iterator[tuple[TokenArray, NDArray[np.int64]]]:
        """Yield `(tokens[n], offsets[documents + 1])` of each shard, as read-only maps of its files.

        StoreError if a file is missing, truncated, or has documents or ids out of range.
        """
        for index, shard in enumerate(self.shards):
            tokens = self._map(index, "tokens", self.dtype)
            offsets = self._map(index, "offsets", OFFSET_DTYPE)
            whole = len(offsets) == shard.documents + 1 and offsets[0] == 0 and offsets[-1] == len(tokens)
            if not whole or len(tokens) != shard.tokens or np.any(offsets[1:] < offsets[:-1]):
                raise StoreError(f"shard {index} of {self.directory} does not match its marker")
            largest = int(tokens.max(initial=0))
            if largest >= self.vocab_size:
                raise StoreError(
                    f"shard {index} of {self.directory} holds id {largest:,}, "
                    f"expected below {self.vocab_size:,}"
                )
            yield tokens, offsets

    def _map(self, index: int, suffix: str, dtype: np.dtype[Any]) -> NDArray[Any]:
        _require_files(self.directory, self.shards[index])
        return map_or_empty(shard_path(self.directory, index, suffix), dtype)

    def digests(self) -> Iterator[NDArray[np.uint8]]:
        """Yield the digests of each shard's documents, uint8 [documents, 16]; errors as for `arrays`."""
        for index, shard in enumerate(self.shards):
            digests = self._map(index, "digests", np.dtype(np.uint8))
            if len(digests) != shard.documents * DIGEST_BYTES:
                raise StoreError(f"shard {index} of {self.directory} does not match its marker")
            yield digests.reshape(-1, DIGEST_BYTES)


def open_shards(directory: Path) -> TokenShards:
    """Open a finished directory of token shards, or raise a StoreError; contents are checked during reading."""
    path = directory / STATE_NAME
    try:
        state = load_json(path.read_bytes(), STATES)
    except (FileNotFoundError, NotADirectoryError):
        raise StoreError(f"{directory} has no token shards: {STATE_NAME} is missing") from None
    except ValueError as error:
        raise _unreadable(path, error) from None
    if state.totals is None:
        raise StoreError(f"{directory} is unfinished: run the build again to resume it")
    shards = tuple(read_shard(directory, index) for index in range(state.shards or 0))
    if state.totals != totals_of(shards):
        raise StoreError(
            f"the shards in {directory} have {totals_of(shards)}, expected {state.totals}: build them again"
        )
    return TokenShards(directory, state.vocab_size, shards)


def _unreadable(path: Path, error: Exception) -> StoreError:
    return StoreError(f"{path} cannot be read ({error}): the shards are damaged, build them again")


def shard_path(directory: Path, index: int, suffix: str) -> Path:
    """Return the path of a shard's `tokens`, `offsets`, `digests` or `json`."""
    return directory / f"shard-{index:05d}.{suffix}"


def read_shard(directory: Path, index: int) -> Shard:
    """Read the marker of a shard, checking the sizes of its files."""
    path = shard_path(directory, index, "json")
    try:
        shard = load_json(path.read_bytes(), MARKERS)
    except FileNotFoundError:
        raise StoreError(f"{path} is missing: the shards are damaged, build them again") from None
    except ValueError as error:
        raise _unreadable(path, error) from None
    _require_files(directory, shard)
    return shard


def totals_of(shards: Sequence[Shard]) -> dict[str, int]:
    """Return documents, tokens and characters of all shards."""
    keys = ("documents", "tokens", "characters")
    return {key: sum(getattr(shard, key) for shard in shards) for key in keys}


def _require_files(directory: Path, shard: Shard) -> None:
    for problem in size_problems(directory, shard.files):
        raise StoreError(f"{problem}: build the shards again")


def finish_shards(directory: Path, state: State, shards: Sequence[Shard]) -> None:
    """Mark a directory as complete with these shards."""
    done = dataclasses.replace(state, shards=len(shards), totals=totals_of(shards))
    write_json(directory / STATE_NAME, dataclasses.asdict(done))


def join_shards(directory: Path, state: State, parts: Iterable[TokenShards]) -> None:
    """Complete an empty directory with links to the shards of parts, in order."""
    shards: list[Shard] = []
    for part in parts:
        for shard in part.shards:
            files = {}
            for name, entry in shard.files.items():
                path = shard_path(directory, len(shards), name.rpartition(".")[2])
                path.unlink(missing_ok=True)
                link_or_copy(part.directory / name, path)
                files[path.name] = entry
            shards.append(dataclasses.replace(shard, files=files))
            write_json(shard_path(directory, len(shards) - 1, "json"), dataclasses.asdict(shards[-1]))
    finish_shards(directory, state, shards)


def document_starts(shards: TokenShards) -> NDArray[np.int64]:
    """Return int64 [documents + 1]: the start of each document in the file of `write_closed`, and the end."""
    parts, place = [np.zeros(1, np.int64)], 0
    for _, offsets in shards.arrays():
        parts.append(place + offsets[1:] + np.arange(1, len(offsets)))
        place = int(parts[-1][-1])
    return np.concatenate(parts)


def write_closed(shards: TokenShards, path: Path) -> None:
    """Write all documents, each followed by the sentinel; the file is written atomically."""
    with replacing(path) as filling, filling.open("wb") as file:
        for tokens, offsets in shards.arrays():
            file.write(np.insert(tokens, offsets[1:], sentinel(shards.dtype)).tobytes())


class Filling:
    """The documents of an unfinished shard, in memory."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._ids: list[TokenArray] = []
        self._offsets, self._names = [0], list[str]()
        self.digests = list[bytes]()
        self.tokens = self._characters = 0

    def report(self, shards: Sequence[Shard], on_progress: OnProgress) -> None:
        """Report the tokens of the finished shards and this one."""
        documents, tokens, _ = totals_of(shards).values()
        on_progress(tokens + self.tokens, None, counted(documents + len(self.digests), "document"))

    def add(self, name: str, text: str, ids: NDArray[np.integer[Any]], digest: bytes | None) -> None:
        """Append the ids of the next piece of a document; with its digest, the last one."""
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self._vocab_size:
            raise TokenRangeError(
                f"document {name!r} has ids {ids.min():,} to {ids.max():,}, expected 0 to {self._vocab_size - 1:,}"
            )
        self._ids.append(ids.astype(token_dtype(self._vocab_size)))
        self.tokens += len(ids)
        self._characters += len(text)
        if digest is not None:
            self._offsets.append(self.tokens)
            self.digests.append(digest)
            self._names = [*self._names[:1], name]

    def write(self, directory: Path, index: int) -> Shard:
        """Write the shard to disk, its marker last."""
        offsets = np.array(self._offsets, OFFSET_DTYPE)
        parts: dict[str, Sequence[Any]] = {"tokens": self._ids, "offsets": [offsets], "digests": self.digests}
        files = {}
        for suffix, data in parts.items():
            path = shard_path(directory, index, suffix)
            with path.open("wb") as file:
                file.writelines(data)
            fsync_path(path)
            files[path.name] = FileEntry.of(path)
        documents, first, last = len(self.digests), self._names[0], self._names[-1]
        shard = Shard(documents, self.tokens, self._characters, first, last, files)
        write_json(shard_path(directory, index, "json"), dataclasses.asdict(shard))
        return shard


def resume_shards(directory: Path, state: State) -> tuple[bool, list[Shard]]:
    """Return whether the directory is complete, and its valid shards; remove invalid ones."""
    path = directory / STATE_NAME
    try:
        found = load_json(path.read_bytes(), STATES)
    except (OSError, ValueError):
        found = None
    shards: list[Shard] = []
    if found is not None and dataclasses.replace(found, shards=None, totals=None) == state:
        with suppress(StoreError):
            while True:
                shards.append(read_shard(directory, len(shards)))
        if found.totals == totals_of(shards):
            return True, shards
    write_json(path, dataclasses.asdict(state))
    kept = {shard_path(directory, index, "json").stem for index in range(len(shards))}
    for old in directory.glob("shard-*.*"):
        if old.stem not in kept:
            old.unlink()
    return False, shards
