import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftstore.errors import StoreError
from draftstore.stores.crest.envelope import Entry, Envelope, entry_bytes, train_dictionary
from draftstore.trees.tree import DraftTree
from tests.reference import Nodes, nodes_of
from tests.unit.trees.test_tree import some_nodes


def tree_of(nodes: Nodes) -> DraftTree:
    tokens, parents, levels = zip(*nodes, strict=True) if nodes else ((), (), ())
    return DraftTree(np.array(tokens, np.int32), np.array(parents, np.int16), np.array(levels, np.uint8))


def some_entries(count: int, nodes: int = 64) -> list[Entry]:
    """Return entries that resemble each other, as those of a store do."""
    rng = np.random.default_rng(7)
    found = []
    for _ in range(count):
        size = int(rng.integers(1, nodes + 1))
        parents = np.array([rng.integers(-1, node) if node else -1 for node in range(size)], np.int16)
        levels = np.sort(rng.integers(0, 100, size)).astype(np.uint8)
        tokens = rng.zipf(1.3, size).clip(0, 31_999).astype(np.int32)
        found.append(Entry(DraftTree(tokens, parents, levels), int(rng.zipf(1.5)), int(rng.integers(1, 900))))
    return found


ENTRIES = some_entries(300)
RAW = [entry_bytes(entry) for entry in ENTRIES]
DICTIONARY = train_dictionary(ENTRIES)
DICTIONARIES = pytest.mark.parametrize("dictionary", [b"", DICTIONARY], ids=["plain", "fitted"])


@DICTIONARIES
@given(nodes=some_nodes(), count=st.integers(0, 2**32 - 1), distinct=st.integers(0, 2**32 - 1))
def test_entries_come_back(dictionary: bytes, nodes: Nodes, count: int, distinct: int) -> None:
    envelope = Envelope(dictionary)
    entry = Entry(tree_of(nodes), count, distinct)
    [value] = envelope.pack([entry_bytes(entry)])
    found = envelope.open(value)
    assert nodes_of(found.tree) == nodes
    assert (found.occurrences, found.distinct) == (count, distinct)
    assert [array.dtype for array in (found.tree.tokens, found.tree.parents, found.tree.levels)] == [
        np.int32, np.int16, np.uint8,
    ]  # fmt: skip


def test_the_bytes_of_an_entry() -> None:
    entry = Entry(tree_of([(5, -1, 3), (7, 0, 9)]), 258, 2)
    assert entry_bytes(entry).hex() == "0201000002000000010002000500070000010309"
    wide = Entry(tree_of([(65_536, -1, 3)]), 1, 1)
    assert entry_bytes(wide).hex() == "010000000100000001010100000001000003"


def test_counts_end_at_what_32_bits_hold() -> None:
    entry = Entry(tree_of([(5, -1, 3)]), 2**32 + 7, 2**40)
    found = Envelope(b"").open(Envelope(b"").pack([entry_bytes(entry)])[0])
    assert (found.occurrences, found.distinct) == (2**32 - 1, 2**32 - 1)


def test_the_bits_of_a_value() -> None:
    """Codes fitted to nothing: lengths 0 to 3 of numbers take six bits, others five; all else is escaped by one bit."""
    entry = Entry(tree_of([(5, -1, 3), (7, 0, 9)]), 9, 2)
    counts, size = "00000 001" + "111110 0", "111110 0"
    first = "0 111111 01" + "0 111100" + "0 111110 1"  # 5; the context; level 3
    second = "0 111111 11" + "0 111101" + "0 111111 10"  # 7; node 0; level 3 + 6
    bits = f"{counts}{size}{first}{second}".replace(" ", "")
    filled = bits + "0" * (-len(bits) % 8)
    expected = int(filled, 2).to_bytes(len(filled) // 8, "big")
    assert Envelope(b"").pack([entry_bytes(entry)]) == [expected]


@pytest.mark.parametrize("dictionary", [b"x", DICTIONARY[1:], DICTIONARY[:40]])
def test_a_damaged_dictionary_is_refused(dictionary: bytes) -> None:
    with pytest.raises(StoreError, match=r"the dictionary of the store is damaged \(.*\): build it again"):
        Envelope(dictionary)


# -- damage --------------------------------------------------------------------------------------------------


def open_or_refuse(envelope: Envelope, value: bytes) -> bool:
    """Open a value that may be damaged; return whether it was taken. What is taken is a tree that can be walked."""
    try:
        entry = envelope.open(value)
    except StoreError as error:
        assert str(error).startswith("an entry cannot be read (")  # noqa: PT017
        return False
    size = len(entry.tree)
    assert len(entry.tree.parents) == len(entry.tree.levels) == size
    # A kernel walks up these without looking: a parent behind its child would crash the reader.
    assert (entry.tree.parents >= -1).all()
    assert (entry.tree.parents < np.arange(size)).all()
    return True


@DICTIONARIES
@given(value=st.binary(max_size=200))
def test_any_bytes_are_an_entry_or_an_error(dictionary: bytes, value: bytes) -> None:
    open_or_refuse(Envelope(dictionary), value)


@DICTIONARIES
def test_changed_cut_and_longer_values(dictionary: bytes) -> None:
    envelope = Envelope(dictionary)
    chance = random.Random(1)
    values = envelope.pack(RAW[:40])
    for value in values:
        for size in range(len(value)):
            assert not open_or_refuse(envelope, value[:size])
        for _ in range(50):
            damaged = bytearray(value)
            for _ in range(chance.randint(1, 3)):
                damaged[chance.randrange(len(damaged))] = chance.randrange(256)
            open_or_refuse(envelope, bytes(damaged))
