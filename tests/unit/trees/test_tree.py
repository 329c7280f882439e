import math
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from draftstore.errors import DraftTreeError
from draftstore.trees.codec import MAX_NODES
from draftstore.trees.tree import LEVEL_BOUNDS, LEVEL_PROBS, DraftTree, best_chain, highest_level, level_of
from tests.fakes.adversaries import Path
from tests.fakes.adversaries import tree_of as tree_from_paths
from tests.reference import Nodes, nodes_of


def tree_of(tokens: list[int], parents: list[int], levels: list[int]) -> DraftTree:
    return DraftTree(np.array(tokens, np.int32), np.array(parents, np.int16), np.array(levels, np.uint8))


IDS = st.integers(0, 5) | st.integers(0, 65_535) | st.integers(0, 2**31 - 1)


@st.composite
def trees(draw: st.DrawFn, most: int = 40, least: int = 0, ids: st.SearchStrategy[int] = IDS) -> DraftTree:
    """Draw a tree in canonical order."""
    levels: dict[Path, int] = {(): 0}
    for _ in range(draw(st.integers(least, most))):
        parent = draw(st.sampled_from([*levels]))
        level = min(levels[parent] + draw(st.integers(0, 3) | st.integers(0, 60)), 255)
        levels.setdefault((*parent, draw(ids)), level)
    del levels[()]
    return tree_from_paths({path: float(LEVEL_PROBS[level]) for path, level in levels.items()})


TOKENS = [0, 1, 2, 65_535, 151_664, 2**31 - 1]


def some_nodes(most: int = 12) -> st.SearchStrategy[Nodes]:
    """Draw the nodes of a tree of one node at least."""
    return trees(most, 1, st.sampled_from(TOKENS)).map(nodes_of)


def ancestors(tree: DraftTree, node: int) -> list[int]:
    """Return a node and all above it, from the node upwards."""
    return [] if node < 0 else [node, *ancestors(tree, int(tree.parents[node]))]


ANIMALS = tree_of([300, 7, 9, 65_535], [-1, 0, 0, -1], [12, 28, 37, 53])
WIDE = tree_of([65_536, 151_664], [-1, 0], [0, 16])


def chain(n: int, token: int) -> DraftTree:
    return tree_of([token] * n, list(range(-1, n - 1)), [0] * n)


# -- codec ---------------------------------------------------------------------------------------------------


@given(trees())
def test_decoding_reverses_encoding(tree: DraftTree) -> None:
    tree.validate()
    data = tree.to_bytes()
    for view in (data, memoryview(data)):
        found = DraftTree.from_bytes(view)
        assert found == tree
        assert hash(found) == hash(tree)
        assert found != data
        assert nodes_of(found) == nodes_of(tree)
        assert [found.tokens.dtype, found.parents.dtype, found.levels.dtype] == [np.int32, np.int16, np.uint8]


GOLDEN = {
    "none": (tree_of([], [], []), "01 00 0000"),
    "narrow": (ANIMALS, "01 00 0400  2c01 0700 0900 ffff  00 01 01 00  0c 1c 25 35"),
    "wide": (WIDE, "01 01 0200  00000100 70500200  00 01  00 10"),
    "most nodes with narrow parents": (
        chain(256, 513),
        "01 00 0001" + "0102" * 256 + "".join(f"{i:02x}" for i in range(256)) + "00" * 256,
    ),
    "300 wide nodes": (
        chain(300, 65_537),
        "01 03 2c01"
        + "01000100" * 300
        + "".join(f"{i:02x}00" for i in range(256))
        + "".join(f"{i:02x}01" for i in range(44))
        + "00" * 300,
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_the_bytes_are_the_documented_ones(name: str) -> None:
    tree, text = GOLDEN[name]
    tree.validate()
    assert tree.to_bytes().hex() == text.replace(" ", "")
    assert DraftTree.from_bytes(bytes.fromhex(text)) == tree


def test_the_largest_tree_survives_the_codec() -> None:
    found = DraftTree.from_bytes(chain(MAX_NODES, 7).to_bytes())
    found.validate()
    assert found.parents.tolist() == list(range(-1, MAX_NODES - 1))
    assert found.depths[-1] == MAX_NODES


BYTES = ANIMALS.to_bytes()
TOO_MANY = MAX_NODES + 1
DAMAGED = {
    "nothing": (b"", "at least 4 bytes, found 0"),
    "half a header": (BYTES[:3], "at least 4 bytes, found 3"),
    "cut": (BYTES[:-1], "4 nodes takes 20 bytes, found 19"),
    "longer": (BYTES + b"\0", "takes 20 bytes, found 21"),
    "version": (b"\x02" + BYTES[1:], "of version 2, this draftstore reads version 1"),
    "flags": (b"\x01\x04" + BYTES[2:], "unknown flags 0x04"),
    "too many": (struct.pack("<BBH", 1, 2, TOO_MANY) + bytes(5 * TOO_MANY), f"expected at most {MAX_NODES}"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_bytes_are_refused(name: str) -> None:
    data, message = DAMAGED[name]
    with pytest.raises(DraftTreeError, match=message):
        DraftTree.from_bytes(data)


# -- structure -----------------------------------------------------------------------------------------------


@given(trees())
def test_masks_positions_and_paths_follow_the_parents(tree: DraftTree) -> None:
    n = len(tree)
    above = [ancestors(tree, node) for node in range(n)]
    assert tree.depths.tolist() == [len(nodes) for nodes in above]
    assert tree.position_offsets().tolist() == [0, *(len(nodes) for nodes in above)]
    mask = [[column == 0 or column - 1 in nodes for column in range(n + 1)] for nodes in above]
    assert tree.attention_mask().tolist() == [[column == 0 for column in range(n + 1)], *mask]
    assert [tree.path(node) for node in range(n)] == [nodes[::-1] for nodes in above]
    assert tree.position_offsets().dtype == np.int64
    assert tree.attention_mask().dtype == np.bool_


@given(st.data(), trees())
def test_accepted_is_the_longest_path_that_agrees(data: st.DataObject, tree: DraftTree) -> None:
    known = sorted(set(tree.tokens.tolist())) or [0]
    path = data.draw(st.sampled_from([tree.path(node) for node in range(len(tree))])) if len(tree) else []
    said = tree.tokens[path].tolist() + data.draw(st.lists(st.sampled_from(known), max_size=3))
    said = said[data.draw(st.integers(0, 1)) :]
    agreeing = [
        nodes
        for nodes in (ancestors(tree, node)[::-1] for node in range(len(tree)))
        if tree.tokens[nodes].tolist() == said[: len(nodes)]
    ]
    assert tree.accepted(np.array(said, np.int32)) == max(agreeing, key=len, default=[])


BROKEN: dict[str, tuple[tuple[list[int], list[int], list[int]], str]] = {
    "fewer parents": (([1, 2], [-1], [0, 0]), "2 tokens, 1 parents, 2 levels"),
    "fewer levels": (([1, 2], [-1, -1], [0]), "2 tokens, 2 parents, 1 levels"),
    "its own parent": (([1, 2], [-1, 1], [0, 0]), "a parent does not precede its child"),
    "no such parent": (([1], [-2], [0]), "a parent does not precede its child"),
    "levels fall": (([1, 2], [-1, -1], [5, 4]), "out of order"),
    "below its parent": (([1, 2], [-1, 0], [5, 4]), "out of order"),
    "depths fall": (([1, 2, 3], [-1, 0, -1], [4, 4, 4]), "out of order"),
    "tokens fall": (([1, 3, 2], [-1, -1, -1], [4, 4, 4]), "out of order"),
    "parents fall": (([1, 2, 7, 7], [-1, -1, 1, 0], [4, 4, 4, 4]), "out of order"),
    "twins": (([1, 1], [-1, -1], [4, 4]), "same token"),
    "twins apart": (([1, 2, 1], [-1, -1, -1], [4, 5, 6]), "same token"),
    "negative id": (([-1, 4], [-1, -1], [0, 0]), "expected ids of at least 0"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_validate_names_the_broken_promise(name: str) -> None:
    arrays, message = BROKEN[name]
    with pytest.raises(DraftTreeError, match=message):
        tree_of(*arrays).validate()


# -- levels --------------------------------------------------------------------------------------------------


def test_levels_are_sixteen_to_an_octave() -> None:
    assert LEVEL_PROBS.shape == LEVEL_BOUNDS.shape == (256,)
    assert LEVEL_PROBS.tolist() == pytest.approx([2 ** (-level / 16) for level in range(256)], rel=1e-7)
    assert [level_of(float(prob)) for prob in LEVEL_PROBS] == list(range(256))
    for level, bound in enumerate(LEVEL_BOUNDS.tolist()):
        assert bound == pytest.approx(2 ** (-(level + 0.5) / 16))
        assert level_of(bound) == level
        assert level_of(math.nextafter(bound, 0)) == level + 1
    assert [level_of(prob) for prob in (7.0, 0.0, -1.0)] == [0, 256, 256]


def close_to(values: NDArray[Any]) -> st.SearchStrategy[float]:
    """Draw one of some values, or a number next to it."""
    exact = st.sampled_from([float(value) for value in values])
    return exact | exact.map(lambda x: math.nextafter(x, 2)) | exact.map(lambda x: math.nextafter(x, 0))


@given(st.floats(0.0, 1.5) | close_to(LEVEL_PROBS))
def test_the_highest_level_is_the_last_of_at_least_a_probability(prob: float) -> None:
    levels = [level for level in range(256) if float(LEVEL_PROBS[level]) >= prob]
    assert highest_level(prob) == max(levels, default=-1)


@given(trees(12), st.integers(0, 7) | st.none())
def test_no_other_path_promises_more(tree: DraftTree, longest: int | None) -> None:
    chain = best_chain(tree, longest)
    chain.validate()
    assert chain.parents.tolist() == list(range(-1, len(chain) - 1))
    depth = len(tree) if longest is None else longest
    cut = [path[:depth] for path in map(tree.path, range(len(tree)))]
    sums = [float(tree.probs[path].sum(dtype=float)) for path in cut if path]
    assert abs(float(chain.probs.sum(dtype=float)) - max(sums, default=0.0)) < 1e-6
    assert chain.tokens.tolist() in [tree.tokens[path].tolist() for path in cut] or not len(chain)
