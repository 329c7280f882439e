import random
import struct
from collections.abc import Sequence

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from draftstore.errors import StoreError
from draftstore.search.cutting import Trees
from draftstore.stores.crest.codes import MAX_BYTES, UNFITTED, EntryCodec, fit_codes, read_codes
from draftstore.trees.batch import DraftBatch
from draftstore.trees.codec import MAX_NODES
from draftstore.trees.tree import LOWEST_LEVEL, DraftTree
from tests.reference import Nodes, Stored, nodes_of
from tests.unit.trees.test_tree import some_nodes


def trees_of(entries: Sequence[Stored]) -> Trees:
    """Return entries as arrays."""
    rows = [(*(zip(*tree, strict=True) if tree else ((), (), ())), 0, 0) for tree, _, _ in entries]
    tokens, parents, levels, sizes, *_ = DraftBatch.of(rows)
    counts = np.array([entry[1:] for entry in entries], np.int64).reshape(-1, 2).T.copy()
    return Trees(tokens, parents, levels, sizes.astype(np.int64), *counts)


def decoded(codec: EntryCodec, value: bytes) -> tuple[DraftTree, int, int]:
    """Return tree, occurrences and distinct tokens of an entry."""
    *arrays, sizes, counts, distinct = codec.decode(
        [value], np.zeros(1, np.int64), 1, MAX_NODES, LOWEST_LEVEL
    )
    return DraftTree(*(rows[0, : sizes[0]] for rows in arrays)), int(counts[0]), int(distinct[0])


def similar_entries(count: int) -> list[Stored]:
    """Return entries that resemble each other, as those of a store do."""
    rng = np.random.default_rng(7)
    found = []
    for _ in range(count):
        size = int(rng.integers(1, 65))
        parents = [int(rng.integers(-1, node)) if node else -1 for node in range(size)]
        levels = np.sort(rng.integers(0, 100, size)).tolist()
        tokens = rng.zipf(1.3, size).clip(0, 31_999).tolist()
        nodes = list(zip(tokens, parents, levels, strict=True))
        found.append(Stored(nodes, int(rng.zipf(1.5)), int(rng.integers(1, 900))))
    return found


ENTRIES = trees_of(similar_entries(300))
FITTED = fit_codes(ENTRIES)
CODECS = pytest.mark.parametrize("codec", [EntryCodec(UNFITTED), EntryCodec(FITTED)], ids=["plain", "fitted"])

# -- the file of codes ---------------------------------------------------------------------------------------


def test_the_bytes_of_the_file() -> None:
    levels = np.cumsum([0, 0, 0, 0, 2, 2, 7]).tolist()
    [plain] = map(
        zstandard.ZstdDecompressor().decompress,
        [fit_codes(trees_of([Stored([(5, -1, level) for level in levels], 0, 0)]))],
    )
    numbers = struct.pack("<34I", 33, 0, *[1] * 32) + bytes([2, 6, 6, 3, *[5] * 30])
    one_symbol = struct.pack("<2I2B", 1, 5, 1, 1), struct.pack("<2I2B", 1, 0, 1, 1)
    assert plain[-4 - 16 :] == struct.pack("<4I", 3, 0, 2, 5) + bytes([1, 2, 3, 3])
    assert plain[len(numbers) : -20] == b"".join(one_symbol)


def packed(*alphabets: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(b"".join(alphabets))


GOOD = struct.pack("<IB", 0, 1)
MANY = struct.pack("<I", 3_000_000) + np.ones(3_000_000, "<u4").tobytes() + b"\x01" * 3_000_001
"""Codes whose table would take 24 GB."""


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (packed(GOOD, GOOD, GOOD), "cut off"),
        (packed(GOOD, GOOD, GOOD, struct.pack("<I", 2**32 - 1)), "cut off"),
        (packed(GOOD, GOOD, GOOD, GOOD, b"x"), "too long"),
        (packed(GOOD, GOOD, GOOD, struct.pack("<3I3B", 2, 1, 0, 1, 2, 2)), "symbols do not ascend"),
        (packed(GOOD, GOOD, GOOD, struct.pack("<2I2B", 1, 1, 0, 1)), "a code has an invalid length"),
        (packed(GOOD, GOOD, GOOD, struct.pack("<2I2B", 1, 1, 33, 1)), "a code has an invalid length"),
        (
            packed(GOOD, GOOD, GOOD, struct.pack("<3I3B", 2, 1, 1, 1, 1, 1)),
            "more codes than their lengths allow",
        ),
        (packed(GOOD, GOOD, GOOD, MANY), "more codes than their lengths allow"),
        (b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", 1 << 60), "too long"),
        (packed(GOOD, GOOD, GOOD, bytes(MAX_BYTES)), "too long"),
        (packed(GOOD)[:4], "content size"),
        (b"", "content size"),
        (b"x", "content size"),
        (FITTED[1:], "content size"),
        (FITTED[:40], "decompress"),
    ],
)
def test_damaged_files_are_refused(data: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        read_codes(data)
    with pytest.raises(StoreError, match=r"the dictionary of the store is damaged \(.*\): build it again"):
        EntryCodec(data)


# -- entries -------------------------------------------------------------------------------------------------


@CODECS
@given(nodes=some_nodes(), count=st.integers(0, 2**32 - 1), distinct=st.integers(0, 2**32 - 1))
def test_entries_come_back(codec: EntryCodec, nodes: Nodes, count: int, distinct: int) -> None:
    [value] = codec.encode(trees_of([Stored(nodes, count, distinct)]))
    tree, *counts = decoded(codec, value)
    assert nodes_of(tree) == nodes
    assert counts == [count, distinct]
    assert [array.dtype for array in (tree.tokens, tree.parents, tree.levels)] == [
        np.int32, np.int16, np.uint8,
    ]  # fmt: skip


def test_counts_are_limited_to_32_bits() -> None:
    codec = EntryCodec(UNFITTED)
    [value] = codec.encode(trees_of([Stored([(5, -1, 3)], 2**32 + 7, 2**40)]))
    assert decoded(codec, value)[1:] == (2**32 - 1, 2**32 - 1)


def test_the_bits_of_a_value() -> None:
    """Codes fitted to nothing: lengths 0 to 3 of numbers take six bits, others five; all else is escaped by one bit."""
    entry = Stored([(5, -1, 3), (7, 0, 9)], 9, 2)
    counts, size = "00000 001" + "111110 0", "111110 0"
    first = "0 111111 01" + "0 111100" + "0 111110 1"  # 5; the context; level 3
    second = "0 111111 11" + "0 111101" + "0 111111 10"  # 7; node 0; level 3 + 6
    bits = f"{counts}{size}{first}{second}".replace(" ", "")
    filled = bits + "0" * (-len(bits) % 8)
    expected = int(filled, 2).to_bytes(len(filled) // 8, "big")
    assert EntryCodec(UNFITTED).encode(trees_of([entry])) == [expected]


def decodes(codec: EntryCodec, value: bytes) -> bool:
    """Return whether a value, which may be damaged, is read; if so, its tree can be walked."""
    try:
        tree, *_ = decoded(codec, value)
    except StoreError as error:
        assert str(error).startswith("an entry cannot be read (")  # noqa: PT017
        return False
    # A kernel walks up these unchecked: a parent after its child would crash the reader.
    assert (tree.parents >= -1).all()
    assert (tree.parents < np.arange(len(tree))).all()
    return True


@CODECS
@given(value=st.binary(max_size=200))
def test_any_bytes_are_an_entry_or_an_error(codec: EntryCodec, value: bytes) -> None:
    decodes(codec, value)


@CODECS
def test_changed_cut_and_longer_values(codec: EntryCodec) -> None:
    chance = random.Random(1)
    for value in codec.encode(ENTRIES)[:40]:
        for size in range(len(value)):
            assert not decodes(codec, value[:size])
        for _ in range(50):
            damaged = bytearray(value)
            for _ in range(chance.randint(1, 3)):
                damaged[chance.randrange(len(damaged))] = chance.randrange(256)
            decodes(codec, bytes(damaged))
