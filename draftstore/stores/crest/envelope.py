"""The format of an n-gram's entry: two counts and the draft tree, compressed with the store's dictionary.

Before compression, little-endian:

    0    u32    occurrences of the n-gram, at most 2^32 - 1
    4    u32    distinct tokens that followed it, counting the end of a document as one
    8           the draft tree, see draftstore.trees.tree

The compressed form is a zstandard frame without magic number, checksum and dictionary id: a tree takes some 270 bytes,
so every byte counts. The dictionary is trained on the trees of the build.
"""

import struct
import threading
from collections.abc import Sequence
from typing import NamedTuple

import zstandard

from draftstore.errors import DraftTreeError, StoreError
from draftstore.trees.tree import DraftTree

DICTIONARY_BYTES = 1 << 14
LEVEL = 19
MAX_ENTRY_BYTES = 1 << 18

_COUNTS = struct.Struct("<II")
_MOST = (1 << 32) - 1


class Entry(NamedTuple):
    """The data of an n-gram: draft tree, occurrences, distinct tokens that follow."""

    tree: DraftTree
    occurrences: int
    distinct: int


def entry_bytes(entry: Entry) -> bytes:
    """Return an entry before compression."""
    return _COUNTS.pack(min(entry.occurrences, _MOST), min(entry.distinct, _MOST)) + entry.tree.to_bytes()


def train_dictionary(samples: Sequence[bytes]) -> bytes:
    """Return a dictionary trained on sample entries; empty if there are too few."""
    try:
        return zstandard.train_dictionary(DICTIONARY_BYTES, list(samples), k=40, d=6, level=LEVEL).as_bytes()
    except zstandard.ZstdError:
        return b""


def damaged(error: object) -> StoreError:
    """Return the error for an unreadable entry."""
    return StoreError(f"an entry cannot be read ({error}): the store is damaged, build it again")


class Envelope:
    """Compresses and decompresses the entries of one store; threads may share it."""

    def __init__(self, dictionary: bytes) -> None:
        """Use a dictionary, which may be empty.

        Raises:
            StoreError: it is not a zstandard dictionary.
        """
        self._local = threading.local()  # (de)compressors are not thread-safe
        try:
            whole = zstandard.DICT_TYPE_FULLDICT
            self._dictionary = (
                zstandard.ZstdCompressionDict(dictionary, dict_type=whole) if dictionary else None
            )
            self._decompressor()
        except zstandard.ZstdError as error:
            raise StoreError(f"the dictionary of the store is damaged ({error}): build it again") from None

    def pack(self, entries: Sequence[bytes]) -> list[bytes]:
        """Compress entries, on all cores."""
        if not entries:
            return []
        options = zstandard.ZstdCompressionParameters.from_level(
            LEVEL,
            format=zstandard.FORMAT_ZSTD1_MAGICLESS,
            write_content_size=True,
            write_checksum=False,
            write_dict_id=False,
        )
        compressor = zstandard.ZstdCompressor(dict_data=self._dictionary, compression_params=options)
        frames = compressor.multi_compress_to_buffer(list(entries), threads=-1)
        return [frames[place].tobytes() for place in range(len(frames))]

    def open(self, value: bytes) -> Entry:
        """Decompress and parse an entry.

        Raises:
            StoreError: it is damaged.
        """
        (data,) = self.unpack([value])
        try:
            count, distinct = _COUNTS.unpack_from(data)
            return Entry(DraftTree.from_bytes(memoryview(data)[_COUNTS.size :]), count, distinct)
        except (struct.error, DraftTreeError) as error:
            raise damaged(error) from None

    def unpack(self, values: Sequence[bytes]) -> list[bytes]:
        """Return decompressed values.

        Raises:
            StoreError: a value is damaged.
        """
        decompress = self._decompressor().decompress
        try:
            return [decompress(value, MAX_ENTRY_BYTES) for value in values]
        except (zstandard.ZstdError, MemoryError) as error:
            # A damaged frame may claim a size beyond the memory.
            raise damaged(error) from None

    def _decompressor(self) -> zstandard.ZstdDecompressor:
        """Return this thread's decompressor."""
        found: zstandard.ZstdDecompressor | None = getattr(self._local, "decompressor", None)
        if found is None:
            found = self._local.decompressor = zstandard.ZstdDecompressor(
                dict_data=self._dictionary, format=zstandard.FORMAT_ZSTD1_MAGICLESS
            )
        return found
