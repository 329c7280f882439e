"""Token shards: a corpus as token ids on disk, split into documents (written by `draftstore.text.encoding`).

A directory of shards contains, for each shard,

    shard-00000.tokens   the ids of its documents one after the other, little-endian u16 or u32
    shard-00000.offsets  int64[documents + 1]: document i is tokens[offsets[i]:offsets[i + 1]]
    shard-00000.digests  uint8[documents, 16]: what its documents are known by (draftstore.text.digests)
    shard-00000.json     the marker, written last: a shard without one does not exist

and `tokens.json`: the origin of the ids and, once every document is included, the totals.
"""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from draftstore.errors import StoreError, TokenRangeError
from draftstore.storage.files import fsync_path, map_or_empty
from draftstore.storage.manifest import FileEntry, TokenizerIdentity, size_problems
from draftstore.text.digests import DIGEST_BYTES

FORMAT_VERSION = 2
STATE_NAME = "tokens.json"
OFFSET_DTYPE = np.dtype("<i8")

TokenArray: TypeAlias = NDArray[np.unsignedinteger[Any]]


def token_dtype(vocab_size: int) -> np.dtype[np.unsignedinteger[Any]]:
    """Return the little-endian type of token ids on disk: u16 up to 65,535 ids, else u32.

    The type's largest value stays free for `sentinel`.

    Raises:
        TokenRangeError: vocab_size is outside 1 .. 2**31 - 1.
    """
    if not 1 <= vocab_size < 2**31:
        raise TokenRangeError(f"a vocabulary of {vocab_size:,} ids: expected 1 to {2**31 - 1:,}")
    return np.dtype("<u2") if vocab_size <= 65_535 else np.dtype("<u4")


def sentinel(dtype: np.dtype[np.unsignedinteger[Any]]) -> int:
    """Return the separator of documents: the largest value of the type, outside every vocabulary."""
    return int(np.iinfo(dtype).max)


@dataclasses.dataclass(frozen=True)
class Shard:
    """The marker of a finished shard.

    Attributes:
        documents: number of documents.
        tokens: number of tokens.
        characters: length of its documents as text.
        first_id: id of its first document.
        last_id: id of its last document.
        files: size and hash of its other files, by name.
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
        directory: path of the directory.
        vocab_size: ids lie in [0, vocab_size).
        tokenizer: identity of the tokenizer.
        corpus_fingerprint: identity of the corpus, as passed to `tokenize_corpus`.
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

        Raises:
            StoreError: a file is missing, truncated or changed so that documents or ids are out of range.
        """
        for index, shard in enumerate(self.shards):
            require_files(self.directory, shard)
            tokens = map_or_empty(shard_path(self.directory, index, "tokens"), self.dtype)
            offsets = map_or_empty(shard_path(self.directory, index, "offsets"), OFFSET_DTYPE)
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

    def digests(self) -> Iterator[NDArray[np.uint8]]:
        """Yield the digests of each shard's documents, uint8 [documents, 16]: read-only maps of its files.

        Raises:
            StoreError: a file is missing, truncated or has another size than its documents need.
        """
        for index, shard in enumerate(self.shards):
            require_files(self.directory, shard)
            digests = map_or_empty(shard_path(self.directory, index, "digests"), np.dtype(np.uint8))
            if len(digests) != shard.documents * DIGEST_BYTES:
                raise StoreError(f"shard {index} of {self.directory} does not hold what its marker says")
            yield digests.reshape(-1, DIGEST_BYTES)

    def documents(self) -> Iterator[TokenArray]:
        """Yield the ids of each document, shape [n], in reading order: read-only views of the mapped files.

        Raises:
            StoreError: see `arrays`.
        """
        for tokens, offsets in self.arrays():
            for start, end in pairwise(offsets.tolist()):
                yield tokens[start:end]


def open_shards(directory: Path) -> TokenShards:
    """Open a finished directory of token shards; checks sizes now, contents during reading.

    Raises:
        StoreError: no shards there, unfinished, unknown version, or a missing or truncated file.
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
            raise StoreError(f"{directory} is unfinished: run the build again, it resumes where it stopped")
        identity = TokenizerIdentity(**state["tokenizer"])
        count, totals = state["shards"], state["totals"]
        vocab_size, corpus = state["vocab_size"], state["corpus_fingerprint"]
    except (FileNotFoundError, NotADirectoryError):
        raise StoreError(f"{directory} holds no token shards: it has no {STATE_NAME}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise StoreError(
            f"{path} cannot be read ({error}): the shards are damaged, build them again"
        ) from None
    shards = tuple(read_marker(directory, index) for index in range(count))
    for shard in shards:
        require_files(directory, shard)
    if totals != totals_of(shards):
        raise StoreError(
            f"the shards in {directory} hold {totals_of(shards)}, expected {totals}: build them again"
        )
    return TokenShards(directory, vocab_size, identity, corpus, shards)


def shard_path(directory: Path, index: int, suffix: str) -> Path:
    """Return the path of a shard's `tokens`, `offsets`, `digests` or `json`."""
    return directory / f"shard-{index:05d}.{suffix}"


def read_marker(directory: Path, index: int) -> Shard:
    """Read the marker of a shard."""
    path = shard_path(directory, index, "json")
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


def totals_of(shards: Sequence[Shard]) -> dict[str, int]:
    """Return documents, tokens and characters of all shards."""
    return {
        key: sum(getattr(shard, key) for shard in shards) for key in ("documents", "tokens", "characters")
    }


def require_files(directory: Path, shard: Shard) -> None:
    """Refuse a shard with a file that is missing or has another size than in its marker."""
    for problem in size_problems(directory, shard.files):
        raise StoreError(f"{problem}: build the shards again")


def document_starts(shards: TokenShards) -> NDArray[np.int64]:
    """Return int64 [documents + 1]: the start of each document in the file of `write_closed`, and the end."""
    parts, place = [np.zeros(1, np.int64)], 0
    for _, offsets in shards.arrays():
        parts.append(place + offsets[1:] + np.arange(1, len(offsets)))
        place = int(parts[-1][-1])
    return np.concatenate(parts)


def write_closed(shards: TokenShards, path: Path) -> None:
    """Write all documents, each ended by the sentinel; the file is whole or absent."""
    filling = path.with_name(f"{path.name}.tmp")
    with filling.open("wb") as file:
        for tokens, offsets in shards.arrays():
            file.write(np.insert(tokens, offsets[1:], sentinel(shards.dtype)).tobytes())
    fsync_path(filling)
    filling.replace(path)
