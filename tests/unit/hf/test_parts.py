"""The parts of generation with drafts, each by itself: masks, the pool, limits, choices."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from draftstore.hf.checks import depth_limit
from draftstore.hf.choosing import Ids
from draftstore.hf.masks import CHUNKED, FULL, SLIDING, attention_masks
from draftstore.hf.passes import CHUNK, Wants, choices
from draftstore.hf.pools import CachePool
from draftstore.trees.tree import DraftTree
from tests.fakes.adversaries import tree_of
from tests.fakes.hf_models import build, tiny

# --- masks ---


def random_tree(size: int, seed: int) -> DraftTree:
    random = np.random.default_rng(seed)
    paths: list[tuple[int, ...]] = [()]
    while len(paths) <= size:
        path = (*paths[int(random.integers(0, len(paths)))], int(random.integers(0, 500)))
        paths += [path] if path not in paths else []
    return tree_of(paths[1:])


def seen(tree: DraftTree, past: int, rows: int, width: int, kind: str, size: int) -> torch.Tensor:
    """Return bool [rows, width], what each row of a text sees; rows behind the tree are not looked at."""
    count = len(tree) + 1
    position = [*range(past), *(past + int(depth) for depth in tree.position_offsets())]
    among = tree.attention_mask()
    found = torch.zeros(rows, width, dtype=torch.bool)
    for row in range(count):
        own = position[past + row]
        for column in range(past + count):
            near = {
                FULL: True,
                SLIDING: position[column] > own - size,
                CHUNKED: position[column] // size == own // size,
            }[kind]
            found[row, column] = near and (column < past or bool(among[row, column - past]))
    return found


@pytest.mark.parametrize("size", [1, 16, 200])
@pytest.mark.parametrize("sizes", [(0,), (5, 0, 40)])
def test_the_masks_of_a_pass(sizes: tuple[int, ...], size: int) -> None:
    """Texts of different pasts, with trees of different sizes, in layers with and without a window or chunks."""
    trees = [random_tree(nodes, seed=nodes) for nodes in sizes]
    pasts, rows = [37 + 11 * place for place in range(len(trees))], max(sizes) + 1
    width = pasts[-1] + rows + 10
    depths = torch.zeros(len(trees), rows, dtype=torch.int64)
    among = torch.zeros(len(trees), rows, rows, dtype=torch.bool)
    for text, tree in enumerate(trees):
        depths[text, : len(tree) + 1] = torch.from_numpy(tree.position_offsets())
        among[text, : len(tree) + 1, : len(tree) + 1] = torch.from_numpy(tree.attention_mask())
    views = {FULL: None, SLIDING: size, CHUNKED: size}
    masks = attention_masks(views, torch.tensor(pasts)[:, None], depths, among, width, torch.float64)
    assert isinstance(masks, dict)
    for kind, mask in masks.items():
        assert (mask.shape, mask.dtype) == ((len(trees), 1, rows, width), torch.float64)
        for text, tree in enumerate(trees):
            own = mask[text, 0, : len(tree) + 1]
            expected = seen(tree, pasts[text], len(tree) + 1, width, kind, size)
            assert torch.equal(own == 0, expected)
            assert torch.equal(own == -torch.inf, ~expected)


# --- the pool ---

SHAPES: list[tuple[int, int] | None] = [(2, 4), (1, 8), (2, 4), None]
"""Of layers: heads of keys, and their size."""


def numbers(slots: int, heads: int, length: int, size: int) -> torch.Tensor:
    """Return different numbers."""
    count = slots * heads * length * size
    return torch.arange(1.0, count + 1, dtype=torch.float64).view(slots, heads, length, size)


def filled_pool(slots: int, length: int) -> CachePool:
    """Return a pool for layers of different heads and sizes; None is one without keys of its own."""
    layers: list[Any] = [DynamicLayer() for _ in SHAPES]  # type: ignore[no-untyped-call]
    for layer, shape in zip(layers, SHAPES, strict=True):
        if shape is not None:
            states = torch.zeros(1, shape[0], 1, shape[1], dtype=torch.float64)
            layer.update(states, states[..., :2])
    pool = CachePool(Cache(layers=layers), slots, 16)
    pool.resize(length, 0, 0)
    for place, layer in enumerate(held(pool)):
        layer.keys.copy_(place * 10_000 + numbers(*layer.keys.shape))
        layer.values.copy_(-place * 10_000 - numbers(*layer.values.shape))
    return pool


def held(pool: CachePool) -> list[Any]:
    """Return the layers that have keys."""
    layers: list[Any] = list(pool.cache.layers)
    return [layer for layer in layers if layer.keys is not None]


def copies(pool: CachePool) -> list[torch.Tensor]:
    return [states.clone() for layer in held(pool) for states in (layer.keys, layer.values)]


def test_rows_move_to_the_front_of_a_pass_in_place() -> None:
    pool = filled_pool(slots=4, length=64)
    places = [states.data_ptr() for layer in held(pool) for states in (layer.keys, layer.values)]
    for kept in (
        [[0]],
        [[0, 1, 2], []],
        [[0, 2], [0, 1, 2, 3], []],
        [[0, 3, 4, 5, 15], [0, 1, 5, 9], [0, 2]],
    ):
        pasts, expected = [20, 7, 40][: len(kept)], copies(pool)
        pool.move(pasts, kept)
        for states in expected:
            for text, (past, rows) in enumerate(zip(pasts, kept, strict=True)):
                states[text, :, past : past + len(rows)] = states[text, :, [past + row for row in rows]]
        for text, (past, rows) in enumerate(zip(pasts, kept, strict=True)):
            for states, mine in zip(expected, copies(pool), strict=True):
                assert torch.equal(mine[text, :, : past + len(rows)], states[text, :, : past + len(rows)])
        for states, mine in zip(expected, copies(pool), strict=True):
            assert torch.equal(mine[len(kept) :], states[len(kept) :]), "other slots stay"
    assert places == [states.data_ptr() for layer in held(pool) for states in (layer.keys, layer.values)]


# --- limits ---


def test_the_depth_of_drafts() -> None:
    limit = depth_limit(tiny(max_position_embeddings=100))
    assert [limit(position) for position in (0, 90, 98, 99, 100, 500)] == [99, 9, 1, 0, 0, 0]
    rope = {
        "rope_type": "longrope", "rope_theta": 10_000.0, "original_max_position_embeddings": 20,
        "short_factor": [1.0] * 4, "long_factor": [4.0] * 4,
    }  # fmt: skip
    limit = depth_limit(build(max_position_embeddings=100, rope_parameters=rope))
    assert [limit(position) for position in (0, 18, 19, 20, 99)] == [19, 1, 0, 79, 0]


# --- tokens ---


def test_a_text_gives_tensors_that_keep_their_content() -> None:
    prompt = torch.tensor([[1, 2]])
    text = Ids(prompt)
    views = [text.tensor(), *(text.tensor([7, 8][:count]) for count in (1, 2))]
    text.extend([7, 8])
    for token in range(600):
        views.append(text.tensor([token]))
        text.extend([token])
    everything = [1, 2, 7, 8, *range(600)]
    assert all(view[0].tolist() == everything[: view.shape[1]] for view in views)
    assert prompt.tolist() == [[1, 2]]
    assert text.tensor()[0].tolist() == text.ids.tolist() == everything


@pytest.mark.parametrize("size", [3, 100, CHUNK * 8, CHUNK * 8 + 1, CHUNK * 40])
@pytest.mark.parametrize("rows", [1, 9])
def test_the_most_likely_tokens(size: int, rows: int) -> None:
    """As argmax and topk of torch find them; among equals the lowest id is the most likely."""
    random = torch.Generator().manual_seed(size + rows)
    for coarse in (False, True):
        logits = torch.randn(rows, size, generator=random)
        logits = logits.round() if coarse else logits
        found = choices(logits, Wants(candidates=True))
        assert found is not None
        known = min(8, size)
        assert torch.equal(found[:, 0], logits.argmax(-1))
        candidates = found[:, 1 : known + 1]
        assert torch.equal(logits.gather(1, candidates), logits.topk(known, -1).values)
        assert all(len(set(row)) == known for row in candidates.tolist())
        assert (found[:, known + 1 :] == -1).all()
        best = choices(logits, Wants())
        assert best is not None
        assert torch.equal(best, found[:, :1])
    assert choices(logits, Wants(best=False)) is None


def test_what_is_equal_as_float32_is_equal() -> None:
    """Plain generate compares float32 copies, so that the first of two logits wins that differ in float64 only."""
    found = choices(torch.tensor([[0.0, 1.0, 1.0 + 1e-12]], dtype=torch.float64), Wants())
    assert found is not None
    assert found.tolist() == [[1]]
