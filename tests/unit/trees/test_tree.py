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
from draftstore.trees.tree import LEVEL_BOUNDS, LEVEL_PROBS, DraftTree, highest_level, level_of
from tests.fakes.adversaries import tree_of as tree_from_paths


def tree_of(tokens: list[int], parents: list[int], levels: list[int]) -> DraftTree:
    return DraftTree(np.array(tokens, np.int32), np.array(parents, np.int16), np.array(levels, np.uint8))


def canonical(nodes: list[tuple[int, int, int]]) -> DraftTree:
    """Order (token, parent, level) as trees are: the least node whose parent is placed comes next."""
    depths: list[int] = []
    for _, parent, _ in nodes:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    places = {-1: -1}
    rows: list[tuple[int, int, int]] = []
    waiting = set(range(len(nodes)))
    while waiting:
        ready = [i for i in waiting if nodes[i][1] in places]
        best = min(ready, key=lambda i: (nodes[i][2], depths[i], nodes[i][0], places[nodes[i][1]]))
        waiting.remove(best)
        places[best] = len(rows)
        rows.append((nodes[best][0], places[nodes[best][1]], nodes[best][2]))
    return tree_of([row[0] for row in rows], [row[1] for row in rows], [row[2] for row in rows])


@st.composite
def trees(draw: st.DrawFn, most: int = 40) -> DraftTree:
    ids = st.integers(0, 5) | st.integers(0, 65_535) | st.integers(0, 2**31 - 1)
    nodes: list[tuple[int, int, int]] = []
    for i in range(draw(st.integers(0, most))):
        token, parent, more = (
            draw(ids),
            draw(st.integers(-1, i - 1)),
            draw(st.integers(0, 3) | st.integers(0, 60)),
        )
        if parent >= len(nodes) or any(row[:2] == (token, parent) for row in nodes):
            continue
        level = more if parent < 0 else nodes[parent][2] + more
        if level < 256:
            nodes.append((token, parent, level))
    return canonical(nodes)


def ancestors(tree: DraftTree, node: int) -> list[int]:
    """Return a node and all above it, from the node upwards."""
    return [] if node < 0 else [node, *ancestors(tree, int(tree.parents[node]))]


ANIMALS = tree_of([300, 7, 9, 65_535], [-1, 0, 0, -1], [12, 28, 37, 53])
WIDE = tree_of([65_536, 151_664], [-1, 0], [0, 16])


def chain(n: int, token: int) -> DraftTree:
    return tree_of([token] * n, list(range(-1, n - 1)), [0] * n)


# -- codec ---------------------------------------------------------------------------------------------------


@given(trees())
def test_decoding_gives_back_what_was_encoded(tree: DraftTree) -> None:
    data = tree.to_bytes()
    for view in (data, memoryview(data), bytearray(data)):
        found = DraftTree.from_bytes(memoryview(view))
        assert found == tree
        assert [a.dtype.name for a in (found.tokens, found.parents, found.levels)] == [
            "int32",
            "int16",
            "uint8",
        ]
        assert np.array_equal(found.tokens, tree.tokens)
        assert np.array_equal(found.parents, tree.parents)
        assert np.array_equal(found.levels, tree.levels)
        found.validate()


GOLDEN = {
    "none": (tree_of([], [], []), "01 00 0000"),
    "one": (tree_of([1], [-1], [255]), "01 00 0100  0100  00  ff"),
    "narrow": (ANIMALS, "01 00 0400  2c01 0700 0900 ffff  00 01 01 00  0c 1c 25 35"),
    "wide": (WIDE, "01 01 0200  00000100 70500200  00 01  00 10"),
    "highest id": (tree_of([2**31 - 1], [-1], [3]), "01 01 0100  ffffff7f  00  03"),
    "255 nodes": (
        chain(255, 513),
        "01 00 ff00" + "0102" * 255 + "".join(f"{i:02x}" for i in range(255)) + "00" * 255,
    ),
    "300 nodes": (
        chain(300, 513),
        "01 02 2c01"
        + "0102" * 300
        + "".join(f"{i:02x}00" for i in range(256))
        + "".join(f"{i:02x}01" for i in range(44))
        + "00" * 300,
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


@pytest.mark.parametrize("n", [254, 255, 256, 257, 1000, MAX_NODES])
def test_trees_of_any_size_survive_the_codec(n: int) -> None:
    tree = chain(n, 7)
    found = DraftTree.from_bytes(tree.to_bytes())
    found.validate()
    assert found.parents.tolist() == list(range(-1, n - 1))


def test_depths_reach_the_largest_tree() -> None:
    assert chain(MAX_NODES, 7).depths[-1] == MAX_NODES


@pytest.mark.parametrize("tree", [DraftTree.empty(), ANIMALS, WIDE, chain(300, 70_000)], ids=len)
def test_cut_and_longer_bytes_are_refused(tree: DraftTree) -> None:
    data = tree.to_bytes()
    for size in {*range(min(len(data), 60)), *range(len(data) - 5, len(data))} - {-1, len(data)}:
        if size >= 0:
            with pytest.raises(DraftTreeError, match=f"found {size}$"):
                DraftTree.from_bytes(data[:size])
    for more in (b"\0", b"\0\0", data):
        with pytest.raises(
            DraftTreeError, match=f"has {len(data)} bytes here, found {len(data) + len(more)}"
        ):
            DraftTree.from_bytes(data + more)


@pytest.mark.parametrize("version", [0, 2, 255])
def test_an_unknown_version_is_refused(version: int) -> None:
    data = bytes([version]) + ANIMALS.to_bytes()[1:]
    with pytest.raises(DraftTreeError, match=f"of version {version}, this draftstore reads version 1"):
        DraftTree.from_bytes(data)


@pytest.mark.parametrize("flags", [0x04, 0x80, 0xFF, 0x07])
def test_unknown_flags_are_refused(flags: int) -> None:
    data = ANIMALS.to_bytes()
    with pytest.raises(DraftTreeError, match=f"unknown flags {flags:#04x}"):
        DraftTree.from_bytes(data[:1] + bytes([flags]) + data[2:])


def test_more_nodes_than_a_tree_may_have_are_refused() -> None:
    n = MAX_NODES + 1
    data = (
        struct.pack("<BBH", 1, 2, n)
        + struct.pack(f"<{n}H", *[1] * n)
        + struct.pack(f"<{n}H", *range(n))
        + bytes(n)
    )
    with pytest.raises(DraftTreeError, match=f"at most {MAX_NODES}"):
        DraftTree.from_bytes(data)


@given(trees(12), trees(12))
def test_equal_trees_are_those_of_equal_bytes(a: DraftTree, b: DraftTree) -> None:
    assert (a == b) == (a.to_bytes() == b.to_bytes())
    assert a == DraftTree.from_bytes(a.to_bytes())
    assert hash(a) == hash(DraftTree.from_bytes(a.to_bytes()))
    assert a != a.to_bytes()


# -- structure -----------------------------------------------------------------------------------------------


@given(trees())
def test_every_prefix_is_a_valid_tree(tree: DraftTree) -> None:
    tree.validate()
    for size in range(len(tree) + 1):
        prefix = tree.prefix(size)
        prefix.validate()
        assert len(prefix) == size
        assert prefix.tokens.tolist() == tree.tokens[:size].tolist()
    assert tree.prefix(len(tree) + 5) == tree


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


def test_the_empty_tree_has_only_the_context() -> None:
    tree = DraftTree.empty()
    tree.validate()
    assert len(tree) == 0
    assert tree.attention_mask().tolist() == [[True]]
    assert tree.position_offsets().tolist() == [0]
    assert tree.accepted(np.array([1, 2], np.int32)) == []


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
    "fewer tokens": (([1], [-1, -1], [0, 0]), "1 tokens, 2 parents, 2 levels"),
    "its own parent": (([1, 2], [-1, 1], [0, 0]), "a parent does not precede its child"),
    "a later parent": (([1, 2, 3], [-1, 2, 0], [0, 0, 0]), "a parent does not precede its child"),
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
    assert LEVEL_PROBS[[0, 16, 32, 160]].tolist() == [1.0, 0.5, 0.25, 2.0**-10]
    assert [level_of(float(prob)) for prob in LEVEL_PROBS] == list(range(256))


@given(st.floats(2.0**-15.9, 1.0))
def test_rounding_is_to_the_nearest_on_the_logarithmic_scale(prob: float) -> None:
    level = level_of(prob)
    assert 0 <= level <= 255
    assert abs(-16 * math.log2(prob) - level) <= 0.5 + 1e-9
    assert abs(math.log2(float(LEVEL_PROBS[level])) - math.log2(prob)) <= 1 / 32 + 1e-6


@pytest.mark.parametrize("level", [0, 1, 15, 16, 100, 255])
def test_a_bound_belongs_to_its_level_and_what_is_below_to_the_next(level: int) -> None:
    bound = float(LEVEL_BOUNDS[level])
    assert level_of(bound) == level
    assert level_of(math.nextafter(bound, 0)) == level + 1


@pytest.mark.parametrize(
    ("prob", "level"), [(0.0, 256), (-1.0, 256), (1e-9, 256), (2.0**-15, 240), (1.0, 0), (7.0, 0)]
)
def test_levels_end_at_certainty_and_below_the_grid(prob: float, level: int) -> None:
    assert level_of(prob) == level


def close_to(values: NDArray[Any]) -> st.SearchStrategy[float]:
    """Draw one of some values, or a number next to it."""
    exact = st.sampled_from([float(value) for value in values])
    return exact | exact.map(lambda x: math.nextafter(x, 2)) | exact.map(lambda x: math.nextafter(x, 0))


@given(st.floats(0.0, 1.5) | close_to(LEVEL_PROBS))
def test_the_highest_level_is_the_last_of_at_least_a_probability(prob: float) -> None:
    levels = [level for level in range(256) if float(LEVEL_PROBS[level]) >= prob]
    assert highest_level(prob) == max(levels, default=-1)


def test_a_tree_is_cut_to_a_depth() -> None:
    tree = tree_from_paths(
        {(1,): 0.9, (1, 2): 0.8, (1, 2, 3): 0.7, (4,): 0.6, (4, 5): 0.5, (1, 2, 3, 6): 0.4}
    )
    for depth in range(5):
        cut = tree.down_to(depth)
        cut.validate()
        paths = {tuple(tree.tokens[tree.path(node)].tolist()) for node in range(len(tree))}
        assert {tuple(cut.tokens[cut.path(node)].tolist()) for node in range(len(cut))} == {
            path for path in paths if len(path) <= depth
        }
    assert tree.down_to(6) is tree
