"""The parts of generation with drafts, each by itself: masks, caches, limits, passes, texts."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import Cache, DynamicCache, StaticCache
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
)

from draftstore.decoding.acceptance import Acceptance
from draftstore.hf import ModelTarget
from draftstore.hf.caches import FixedCache, GrowingCache, rollback_cache
from draftstore.hf.choosing import Chooser, Text
from draftstore.hf.limits import cut_depth
from draftstore.hf.masks import attention_bias, block_mask, padding_bias, shape_of
from draftstore.hf.passes import CHUNK, Pass, Wants, choices
from draftstore.hf.stopping import StopRules
from draftstore.trees.tree import DraftTree
from tests.fakes.adversaries import tree_of
from tests.fakes.hf_models import tiny

# --- a forward pass of one's own ---


class TableForward:
    """A `Forward` without a model: row r says the token of row r plus one."""

    trees = True

    def __init__(self) -> None:
        self.kept: list[list[int]] = []

    def room(self) -> int | None:
        return 3

    def run(self, tokens: Any, tree: DraftTree, wants: Wants) -> Pass:
        logits = torch.nn.functional.one_hot(torch.from_numpy(tokens + 1) % 16, 16).double()
        return Pass(logits, wants)

    def keep(self, rows: Any) -> None:
        self.kept.append(list(rows))

    def close(self) -> None:
        self.kept.append([-1])


def test_a_target_over_a_forward_pass_of_ones_own() -> None:
    text = Text(torch.tensor([[3, 4]]))
    forward = TableForward()
    target = ModelTarget(forward, Chooser(text, []), text, vocab_size=16)
    target.ask(candidates=True, hidden=True)
    verdict = target.verify(tree_of([(9,), (5, 6), (5, 1)]))
    assert [verdict.choose(row, []) for row in range(5)] == [5, 6, 10, 2, 7]
    candidates = verdict.candidates()
    assert candidates is not None
    assert candidates.shape == (5, 8)
    assert candidates[:, 0].tolist() == [5, 6, 10, 2, 7]
    assert verdict.hidden(0) is None
    target.keep(Acceptance([1, 3], np.array([5, 6, 7], np.int32)))
    assert text.ids == [3, 4, 5, 6, 7]
    target.verify(DraftTree.empty())
    target.close()
    assert forward.kept == [[0, 2, 4], [], [-1]]


def test_fewer_ids_than_candidates() -> None:
    rows = Pass(torch.tensor([[0.0, 2.0, 1.0]]), Wants(candidates=True))
    assert rows.candidates().tolist() == [[1, 2, 0, -1, -1, -1, -1, -1]]
    assert rows.best() == [1]


def random_tree(size: int, seed: int) -> DraftTree:
    random = np.random.default_rng(seed)
    paths: list[tuple[int, ...]] = [()]
    while len(paths) <= size:
        path = (*paths[int(random.integers(0, len(paths)))], int(random.integers(0, 500)))
        paths += [path] if path not in paths else []
    return tree_of(paths[1:])


@pytest.mark.parametrize("size", [0, 1, 5, 40, 140])
def test_the_mask_of_a_pass(size: int) -> None:
    tree = random_tree(size, seed=size)
    past, width = 37, 37 + size + 1 + 10
    like = torch.empty(0, dtype=torch.float64)
    shape = shape_of(tree)
    assert shape.offsets.tolist() == tree.position_offsets().tolist()
    expected = torch.ones(size + 1, width, dtype=torch.bool)
    expected[:, past + size + 1 :] = False
    expected[:, past : past + size + 1] = torch.from_numpy(tree.attention_mask())
    for padding in (0, 3):
        mask = torch.ones(1, past + 1, dtype=torch.int64)
        mask[0, :padding] = 0
        expected[:, :padding] = False
        hidden = padding_bias(mask, past, like)
        assert (hidden is None) == (padding == 0)
        bias = attention_bias(shape, past, width, hidden, like)
        assert bias.dtype == torch.float64
        assert bias.shape == (1, 1, size + 1, width)
        assert torch.equal(bias[0, 0] == 0, expected)
        assert torch.equal(bias[0, 0] == -torch.inf, ~expected)
        blocks: Any = block_mask(shape, past, width, hidden, like.device)
        assert blocks.shape == (1, 1, size + 1, width)
        rows, columns = torch.meshgrid(torch.arange(size + 1), torch.arange(width), indexing="ij")
        assert torch.equal(blocks.mask_mod(0, 0, rows, columns), expected)
        listed = blocks.to_dense()[0, 0].repeat_interleave(128, 0).repeat_interleave(128, 1) != 0
        assert not (expected & ~listed[: size + 1, :width]).any()


def filled(cache: Cache, length: int) -> None:
    states = torch.arange(float(length)).view(1, 1, -1, 1).expand(1, 2, -1, 4)
    for layer in range(2):
        cache.update(states + 100 * layer, -states, layer)


@pytest.mark.parametrize("rows", [[], [0], [0, 1, 2, 3, 4], [0, 3], [0, 1, 4], [0, 2, 3, 4]])
def test_rows_are_taken_out_of_a_cache(rows: list[int]) -> None:
    config = tiny().config
    caches = (DynamicCache(config=config), StaticCache(config, max_cache_len=16))
    for cache, kind in zip(caches, (GrowingCache, FixedCache), strict=True):
        filled(cache, 6)
        memory = rollback_cache(cache)
        assert isinstance(memory, kind)
        assert (memory.length, memory.room()) == (6, None if kind is GrowingCache else 10)
        filled(cache, 5)
        memory.keep(5, rows)
        assert memory.length == int(cache.get_seq_length()) == 6 + len(rows)
        layers: Any = cache.layers
        for place, layer in enumerate(layers):
            kept = layer.keys[0, 1, : memory.length, 3] - 100 * place
            assert kept.tolist() == [*range(6), *rows]
            assert layer.values[0, 0, : memory.length, 0].tolist() == (-kept).tolist()
        filled(cache, 1)
        assert int(cache.get_seq_length()) == 7 + len(rows)


def test_a_tree_is_cut_to_a_depth() -> None:
    tree = tree_of({(1,): 0.9, (1, 2): 0.8, (1, 2, 3): 0.7, (4,): 0.6, (4, 5): 0.5, (1, 2, 3, 6): 0.4})
    for depth in range(5):
        cut = cut_depth(tree, depth)
        cut.validate()
        paths = {tuple(tree.tokens[tree.path(node)].tolist()) for node in range(len(tree))}
        assert {tuple(cut.tokens[cut.path(node)].tolist()) for node in range(len(cut))} == {
            path for path in paths if len(path) <= depth
        }
    assert cut_depth(tree, None) is tree


def test_a_text_gives_tensors_that_keep_their_content() -> None:
    prompt = torch.tensor([[1, 2]])
    text = Text(prompt)
    assert text.tensor() is not None
    views = [text.tensor([7, 8][:count]) for count in (1, 2)]
    text.extend([7, 8])
    for token in range(600):
        views.append(text.tensor([token]))
        text.extend([token])
    everything = [1, 2, 7, 8, *range(600)]
    assert all(view[0].tolist() == everything[: view.shape[1]] for view in views)
    assert prompt.tolist() == [[1, 2]]
    assert text.tensor()[0].tolist() == text.ids == everything


@pytest.mark.parametrize("size", [5, 100, CHUNK * 8, CHUNK * 8 + 1, CHUNK * 40])
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
    logits = torch.tensor([[0.0, 1.0, 1.0 + 1e-12]], dtype=torch.float64)
    assert Pass(logits, Wants()).best() == [1]


no_scores: Any = None


class EveryThird(StoppingCriteria):
    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return input_ids.sum(dim=1) % 3 == 0


@pytest.mark.parametrize(
    "criteria",
    [
        [MaxLengthCriteria(7)],
        [MaxLengthCriteria(9, max_position_embeddings=6)],
        [EosTokenCriteria([4, 6])],
        [EosTokenCriteria(torch.tensor(8)), MaxLengthCriteria(8)],
        [MaxTimeCriteria(-1.0)],
        [MaxTimeCriteria(1000.0), EveryThird()],
        [EveryThird(), EosTokenCriteria(3)],
        [],
    ],
)
def test_stops_say_what_the_criteria_say(criteria: list[Any]) -> None:
    text = Text(torch.tensor([[1, 9]]))
    asked = StoppingCriteriaList(criteria)
    stops = StopRules(asked, text, Chooser(text, []))
    assert stops.max_length == asked.max_length
    for kept in range(4):
        emitted = list(range(2 + kept, 8))
        for count in range(1, len(emitted) + 1):
            expected = bool(asked(torch.tensor([[*text.ids, *emitted[:count]]]), no_scores))
            assert stops(emitted[:count]) is expected
        text.extend(emitted[:1])
