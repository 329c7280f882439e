"""Passes over static buffers: the same tokens as plain generate, with and without CUDA graphs.

There are no GPUs here: graphs are played by stand-ins that compute again what was captured, into the same tensors. What
only a GPU can tell is in the tests at the end, which are skipped without one.
"""

import gc
import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache, StaticCache

from draftstore.decoding.loop import Fixed
from draftstore.drafting.drafter import Drafter
from draftstore.errors import DecodingError
from draftstore.hf import batches, generate, graph_runner, graphs, pools
from draftstore.hf.batches import Batch
from draftstore.hf.caches import rollback_cache
from draftstore.hf.choosing import Text
from draftstore.hf.graphs import GraphForward, graph_forward, why_not
from draftstore.hf.members import Member
from draftstore.hf.pass_shapes import BUCKETS, MAX_ROWS, PassShape
from draftstore.hf.passes import Wants
from draftstore.hf.targets import Prefilled, TreeForward
from draftstore.hf.texts import prepare_text
from draftstore.trees.tree import DraftTree
from tests.fakes.acceptance import accept_greedy
from tests.fakes.adversaries import AlwaysWrong, OverBudget, Prophet, RandomTrees, Silent, tree_of
from tests.fakes.gpus import needs_gpu
from tests.fakes.hf_models import STORIES, stories, story_ids, tiny

VOCAB = 512
NEW = 48

DRAFTERS: dict[str, Callable[[list[int]], Drafter | None]] = {
    "none": lambda truth: None,
    "silent": lambda truth: Silent(VOCAB),
    "random": lambda truth: RandomTrees(VOCAB),
    "over budget": lambda truth: OverBudget(VOCAB),
    "always wrong": lambda truth: AlwaysWrong(VOCAB, [truth]),
    "half a prophet": lambda truth: Prophet(VOCAB, [truth], error_rate=0.5),
    "prophet": lambda truth: Prophet(VOCAB, [truth], depth=12),
}


def plainly(model: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    """Return what plain generate returns."""
    options = {"max_new_tokens": NEW, "do_sample": False} | options
    output: torch.Tensor = model.generate(ids, **options)
    return output


def with_graphs(model: Any, ids: torch.Tensor, drafter: Drafter | None, **changes: Any) -> Any:
    """Generate with a static cache, from buffers."""
    options: dict[str, Any] = {
        "max_new_tokens": NEW,
        "do_sample": False,
        "cache_implementation": "static",
    } | changes
    return generate(model, ids, drafter=drafter, forward=GraphForward, **options)


def moved(model: Any, device: str) -> Any:
    """Bring a model to a device; it stays the same object."""
    return torch.nn.Module.to(model, device)


def prefilled(model: Any, ids: torch.Tensor, room: int = 200, cache: Any = None) -> Prefilled:
    """Read a prompt into a cache."""
    cache = cache or StaticCache(config=model.config, max_cache_len=ids.shape[1] + room)
    with torch.no_grad():
        model(input_ids=ids, past_key_values=cache, use_cache=True)
    positions = torch.arange(ids.shape[1], device=ids.device)[None] + 1
    kwargs = {"past_key_values": cache, "attention_mask": None, "position_ids": positions, "use_cache": True}
    return Prefilled(model, rollback_cache(cache), kwargs, Text(torch.cat([ids, ids[:, :1]], dim=1)))


def random_tree(nodes: int, rng: np.random.Generator) -> DraftTree:
    """Return a tree of random shape; siblings may be alike, which no pass minds."""
    parents = np.array([rng.integers(-1, node) if node else -1 for node in range(nodes)], np.int16)
    return DraftTree(rng.integers(0, VOCAB, nodes).astype(np.int32), parents, np.zeros(nodes, np.uint8))


# --- the same tokens ---


@pytest.mark.parametrize("name", DRAFTERS)
def test_greedy_output_is_that_of_plain_generate(data: Path, name: str) -> None:
    model = stories(data)
    for story in STORIES[:2]:
        ids = story_ids(data, story)
        truth = plainly(model, ids)
        drafter = DRAFTERS[name](truth[0].tolist())
        assert torch.equal(with_graphs(model, ids, drafter), truth)


def test_a_drafter_that_knows_has_accepted_rows_moved(data: Path) -> None:
    model, ids = stories(data), story_ids(data)
    truth = plainly(model, ids)
    drafter = Prophet(VOCAB, [truth[0].tolist()])
    passes: list[int] = []
    output = with_graphs(model, ids, drafter, on_step=lambda step: passes.append(len(step.tokens)))
    assert torch.equal(output, truth)
    assert drafter.moved > 5
    assert drafter.off_first > 5
    assert sum(passes) / len(passes) > 1.5


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "mistral"])
def test_architectures(architecture: str) -> None:
    model = tiny(architecture, vocab_size=64)
    ids = torch.tensor([[5, 9, 2]])
    truth = plainly(model, ids)
    drafter = Prophet(64, [truth[0].tolist()], error_rate=0.3)
    assert torch.equal(with_graphs(model, ids, drafter), truth)
    assert drafter.moved > 0


def test_sampled_output_is_that_of_plain_generate(data: Path) -> None:
    model: Any = stories(data)
    ids = story_ids(data)
    options = {"do_sample": True, "temperature": 0.9, "top_k": 20, "repetition_penalty": 1.1}
    torch.manual_seed(7)
    truth: torch.Tensor = model.generate(ids, max_new_tokens=NEW, **options)
    torch.manual_seed(7)
    drafter = Prophet(VOCAB, [truth[0].tolist()], error_rate=0.3)
    assert torch.equal(with_graphs(model, ids, drafter, **options), truth)


def test_padding_in_front_of_the_prompt_is_not_seen(data: Path) -> None:
    model, ids = stories(data), story_ids(data)
    truth = plainly(model, ids)[0, ids.shape[1] :]
    padded = torch.cat([torch.full((1, 5), 2), ids], dim=1)
    mask = (torch.arange(padded.shape[1]) >= 5).long()[None]
    known = [*padded[0].tolist(), *truth.tolist()]
    for drafter in (None, Prophet(VOCAB, [known[5:]], error_rate=0.3)):
        output = with_graphs(model, padded, drafter, attention_mask=mask)
        assert output[0].tolist() == known


def test_what_is_returned_beside_the_tokens(data: Path) -> None:
    model, ids = stories(data), story_ids(data)
    options: dict[str, Any] = {
        "return_dict_in_generate": True,
        "output_logits": True,
        "output_scores": True,
        "output_hidden_states": True,
        "cache_implementation": "static",
    }
    plain: Any = plainly(model, ids, **options)
    drafter = Prophet(VOCAB, [plain.sequences[0].tolist()])
    drafted = with_graphs(model, ids, drafter, **options)
    assert torch.equal(drafted.sequences, plain.sequences)
    for mine, theirs in zip(drafted.logits, plain.logits, strict=True):
        torch.testing.assert_close(mine, theirs)
    for mine, theirs in zip(drafted.hidden_states[1:], plain.hidden_states[1:], strict=True):
        torch.testing.assert_close(mine, theirs)
    held = plain.sequences.shape[1] - 1
    for mine, theirs in zip(drafted.past_key_values.layers, plain.past_key_values.layers, strict=True):
        assert int(mine.get_seq_length()) == held
        torch.testing.assert_close(mine.keys[:, :, :held], theirs.keys[:, :, :held])
        torch.testing.assert_close(mine.values[:, :, :held], theirs.values[:, :, :held])


# --- single passes ---


@pytest.mark.parametrize("nodes", [0, 1, 2, 5, 7, 30, 63, 100, 127])
def test_a_pass_yields_what_it_yields_without_buffers(data: Path, nodes: int) -> None:
    model, ids = stories(data), story_ids(data)
    rng = np.random.default_rng(nodes)
    ours, theirs = GraphForward(prefilled(model, ids)), TreeForward(prefilled(model, ids))
    wants = Wants(best=True, candidates=True, hidden=True)
    with torch.no_grad():
        for _ in range(2):
            tree = random_tree(nodes, rng)
            tokens = np.append(rng.integers(0, VOCAB), tree.tokens).astype(np.int64)
            mine, others = ours.run(tokens, tree, wants), theirs.run(tokens, tree, wants)
            assert mine.best() == others.best()
            assert np.array_equal(mine.candidates(), others.candidates())
            for row in {0, nodes // 2, nodes}:
                torch.testing.assert_close(mine.logits(row), others.logits(row))
                np.testing.assert_allclose(mine.hidden(row), others.hidden(row), rtol=1e-5)  # type: ignore[arg-type]
            rows = [0, *(node + 1 for node in tree.path(nodes - 1))] if nodes else [0]
            ours.keep(rows)
            theirs.keep(rows)
    ours.close()


def test_a_pass_can_be_undone(data: Path) -> None:
    model, ids = stories(data), story_ids(data)
    forward = GraphForward(prefilled(model, ids))
    tree = tree_of([(3, 4), (5,)])
    first = forward.run(np.array([9, *tree.tokens]), tree, Wants()).best()
    forward.keep(())
    forward.run(np.array([8, 1, 2, 3]), tree_of([(1, 2, 3)]), Wants()).best()
    forward.keep(())
    assert forward.run(np.array([9, *tree.tokens]), tree, Wants()).best() == first
    forward.close()


def test_room_ends_with_the_cache_and_with_the_largest_graph(data: Path) -> None:
    model, ids = stories(data), story_ids(data)
    forward = GraphForward(prefilled(model, ids, room=300))
    assert forward.room() == MAX_ROWS - 1
    forward.close()
    forward = GraphForward(prefilled(model, ids, room=3))
    assert forward.room() == 2
    forward.run(np.array([9, 1]), tree_of([(1,)]), Wants()).best()
    forward.keep([0, 1])
    assert forward.room() == 0
    forward.close()


def test_what_is_left_of_the_pool_is_never_seen(data: Path) -> None:
    model, ids = stories(data), story_ids(data)
    truth = plainly(model, ids)
    with_graphs(model, story_ids(data, STORIES[3]), RandomTrees(VOCAB), max_new_tokens=200)
    pool = graphs._RUNNERS[model].pool
    held = ids.shape[1]
    pool.keys[..., held:, :], pool.values[..., held:, :] = torch.nan, torch.inf
    assert torch.equal(with_graphs(model, ids, RandomTrees(VOCAB)), truth)


def test_the_pool_moves_rows_of_all_layers_in_place(data: Path) -> None:
    model, ids = stories(data), story_ids(data)
    cache: Any = prefilled(model, ids).model_kwargs["past_key_values"]
    pool = pools.CachePool(cache.layers[0], len(cache.layers), 64, 16)
    rng = np.random.default_rng(1)
    pool.keys.copy_(torch.from_numpy(rng.random(pool.keys.shape)))
    pool.values.copy_(torch.from_numpy(rng.random(pool.values.shape)))
    for rows in ([0], [0, 1, 2], [0, 2], [0, 1, 5, 9], [0, 3, 4, 5, 15], []):
        keys, values, place = pool.keys.clone(), pool.values.clone(), pool.keys.data_ptr()
        pool.move([20], [rows])
        keys[:, :, :, 20 : 20 + len(rows)] = keys[:, :, :, [20 + row for row in rows]]
        values[:, :, :, 20 : 20 + len(rows)] = values[:, :, :, [20 + row for row in rows]]
        assert torch.equal(pool.keys, keys)
        assert torch.equal(pool.values, values)
        assert pool.keys.data_ptr() == place
    assert pool.cache.layers[1].keys.data_ptr() == pool.keys[1].data_ptr()  # type: ignore[union-attr]


# --- one runner a model ---


def test_pool_and_buffers_serve_all_texts_that_fit(data: Path) -> None:
    model = tiny(seed=11)
    with_graphs(model, torch.tensor([[1, 2, 3]]), None)
    runner = graphs._RUNNERS[model]
    with_graphs(model, torch.tensor([[4, 5]]), None)
    assert graphs._RUNNERS[model] is runner
    with_graphs(model, torch.tensor([[4, 5]]), None, max_new_tokens=400)
    assert graphs._RUNNERS[model] is not runner
    assert graphs._RUNNERS[model].pool.length >= 402 + MAX_ROWS


def test_weights_that_moved_need_a_new_runner() -> None:
    model = tiny(seed=12)
    with_graphs(model, torch.tensor([[1, 2, 3]]), None)
    runner = graphs._RUNNERS[model]
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    with_graphs(model, torch.tensor([[1, 2, 3]]), None)
    assert graphs._RUNNERS[model] is not runner


def test_a_second_text_at_the_same_time_is_refused_until_the_first_is_closed(data: Path) -> None:
    model, ids = stories(data), story_ids(data)
    first = GraphForward(prefilled(model, ids))
    with pytest.raises(DecodingError, match="decoding another text"):
        GraphForward(prefilled(model, ids))
    first.close()
    second = GraphForward(prefilled(model, ids))
    first.close()  # has no say any more
    assert graphs._RUNNERS[model].busy
    del second  # an abandoned text does not block the model
    gc.collect()
    assert not graphs._RUNNERS[model].busy


def test_a_text_that_failed_leaves_the_model_free(data: Path) -> None:
    model, ids = stories(data), story_ids(data)

    steps: list[Any] = []

    def fail(step: Any) -> None:
        steps.append(step)
        if len(steps) == 3:
            raise KeyError("enough")

    with pytest.raises(KeyError, match="enough"):
        with_graphs(model, ids, RandomTrees(VOCAB), on_step=fail)
    assert not graphs._RUNNERS[model].busy


def test_graphs_go_with_their_model() -> None:
    model: Any = tiny.__wrapped__(seed=13)
    with_graphs(model, torch.tensor([[1, 2, 3]]), None)
    runner = weakref.ref(graphs._RUNNERS[model])
    del model
    gc.collect()
    assert runner() is None


def test_inference_mode_and_gradients_do_not_mix_up_the_buffers(data: Path) -> None:
    model, ids = stories(data), story_ids(data)
    truth = plainly(model, ids)
    graphs._RUNNERS.pop(model, None)
    with torch.inference_mode():
        assert torch.equal(with_graphs(model, ids, RandomTrees(VOCAB)), truth)
    assert torch.equal(with_graphs(model, ids, RandomTrees(VOCAB)), truth)


# --- refusals ---


def test_what_cannot_be_captured_is_refused_in_words(data: Path) -> None:
    model, ids = stories(data), story_ids(data)
    growing = prefilled(model, ids, cache=DynamicCache(config=model.config))
    assert why_not(growing) == "a DynamicCache grows: use cache_implementation='static'"
    with pytest.raises(DecodingError, match="no CUDA graphs here: a DynamicCache grows"):
        GraphForward(growing)
    eager = prefilled(stories(data, attention="eager"), ids)
    assert why_not(eager) == "attention is 'eager', expected 'sdpa'"
    sliding = tiny("mistral", sliding_window=8)
    assert why_not(prefilled(sliding, torch.tensor([[1, 2]]))) is not None
    rope = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
    dynamic = tiny.__wrapped__(rope_parameters=rope)
    assert "RoPE" in str(why_not(prefilled(dynamic, torch.tensor([[1, 2]]))))
    assert why_not(prefilled(model, ids)) is None


def test_without_a_gpu_generation_takes_the_other_way(data: Path) -> None:
    assert graph_forward(prefilled(stories(data), story_ids(data))) is None


# --- capture ---


class OnDevice(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes tensors of the host among those of another device: a copy of them cannot be part of a graph."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.strangers: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor)]
        if any(tensor.device.type != "meta" for tensor in tensors):
            self.strangers.add(str(func))
        return result


ROPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "llama3": {
        "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 64},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 8.0},
}  # fmt: skip


def runner_without_values(architecture: str, rope: str, texts: int = 1) -> graph_runner.GraphRunner:
    """Return the runner of a model on the device `meta`, where tensors have shapes and no values."""
    changes = {"rope_parameters": ROPES[rope]} if ROPES[rope] else {}
    model = moved(tiny.__wrapped__(architecture, dtype=torch.bfloat16, **changes), "meta")
    cache: Any = StaticCache(config=model.config, max_cache_len=32)
    cache.early_initialization(1, 2, 8, torch.bfloat16, torch.device("meta"))
    runner = graph_runner.GraphRunner(model, pools.CachePool(cache.layers[0], 2, 256, MAX_ROWS, texts), 0)
    runner.model = model  # type: ignore[attr-defined]
    return runner


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize("rope", ["plain", "llama3", "yarn"])
def test_no_value_is_looked_at_in_a_pass(architecture: str, rope: str) -> None:
    """A graph is recorded without values, on one device: on `meta` a pass that needs more fails."""
    runner = runner_without_values(architecture, rope)
    with torch.no_grad(), OnDevice() as seen:
        for wants in (Wants(), Wants(candidates=True, hidden=True), Wants(best=False, layers=True)):
            for rows in (1, 2, 16, 128):
                result = runner._compute(PassShape(1, rows, 256, wants))
                assert result._logits.shape == (rows, 64)
    assert seen.strangers == set()


def test_no_value_is_looked_at_in_a_pass_over_several_texts() -> None:
    runner = runner_without_values("llama", "llama3", texts=9)
    with torch.no_grad(), OnDevice() as seen:
        for texts, rows in ((1, 1), (4, 16), (8, 64)):
            result = runner._compute(PassShape(texts, rows, 256, Wants(candidates=True, hidden=True)))
            assert result._logits.shape == (texts * rows, 64)
    assert seen.strangers == set()


def test_a_pass_that_looks_at_values_would_be_noticed() -> None:
    runner = runner_without_values("llama", "dynamic")
    with torch.no_grad(), pytest.raises(RuntimeError, match="meta tensors"):
        runner._compute(PassShape(1, 1, 256, Wants()))


class Played:
    """Stands for `torch.cuda`: a graph that runs again what was captured, into the tensors of the capture."""

    def __init__(self) -> None:
        self.shapes: list[PassShape] = []
        self.captured: list[tuple[int, int]] = []
        self.replayed: list[tuple[int, int]] = []
        self.warmed = 0
        self.recording: Graph | None = None

    @contextmanager
    def graph(self, graph: "Graph", **options: Any) -> Iterator[None]:
        assert options["capture_error_mode"] == "thread_local"
        assert options["pool"] == "pool"
        self.recording = graph
        yield
        self.recording = None

    def compute(self, real: Any) -> Any:
        """Return `GraphRunner._compute` that leaves word with the graph that is being captured."""

        def compute(runner: Any, shape: PassShape) -> Any:
            result = real(runner, shape)
            if self.recording is None:
                self.warmed += 1
                return result
            self.shapes.append(shape)
            self.captured.append((shape.rows, shape.width))
            self.recording.again = lambda: real(runner, shape)
            self.recording.shape, self.recording.result = (shape.rows, shape.width), result
            for tensor in tensors_of(result):
                tensor.fill_(-1)  # a capture computes nothing
            return result

        return compute


class Graph:
    """A captured pass."""

    def __init__(self, played: Played) -> None:
        self.played = played
        self.again: Any = None
        self.result: Any = None
        self.shape = (0, 0)

    def replay(self) -> None:
        self.played.replayed.append(self.shape)
        for mine, fresh in zip(tensors_of(self.result), tensors_of(self.again()), strict=True):
            mine.copy_(fresh)


def tensors_of(rows: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(vars(rows)) if isinstance(leaf, torch.Tensor)]


class Event:
    """Stands for `torch.cuda.Event`."""

    def record(self, stream: Any) -> None:
        """Pass at once."""

    def synchronize(self) -> None:
        """Wait for nothing."""


class Stream:
    """Stands for `torch.cuda.Stream`."""

    def wait_stream(self, other: Any) -> None:
        """Wait for nothing."""


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Iterator[Played]:
    """Capture and replay graphs on the CPU."""
    play = Played()
    monkeypatch.setattr(graph_runner, "captures", lambda device: True)
    monkeypatch.setattr(graph_runner, "event", lambda device: Event())
    monkeypatch.setattr(graph_runner.GraphRunner, "_compute", play.compute(graph_runner.GraphRunner._compute))
    cuda = {
        "graph": play.graph,
        "CUDAGraph": lambda: Graph(play),
        "graph_pool_handle": lambda: "pool",
        "Stream": lambda device: Stream(),
        "current_stream": lambda *device: Stream(),
        "stream": lambda stream: nullcontext(),
        "device": lambda device: nullcontext(),
    }
    for name, stand_in in cuda.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    graphs._RUNNERS.clear()
    yield play
    graphs._RUNNERS.clear()


def test_graphs_are_captured_once_for_each_shape(data: Path, played: Played) -> None:
    model = stories(data)
    for story in STORIES[:2]:
        ids = story_ids(data, story)
        truth = plainly(model, ids)
        for drafter in (None, RandomTrees(VOCAB), Prophet(VOCAB, [truth[0].tolist()], depth=20)):
            assert torch.equal(with_graphs(model, ids, drafter), truth)
    assert len(played.captured) == len(set(played.captured))
    assert {rows for rows, _ in played.captured} <= set(BUCKETS)
    assert {width for _, width in played.captured} == {256}
    assert set(played.replayed) == set(played.captured)
    assert len(played.captured) >= 5
    assert played.warmed == graph_runner.WARM_UPS * len(played.captured)
    assert len(played.replayed) > 100


def generated(data: Path, model: Any, truths: list[torch.Tensor]) -> list[list[int]]:
    """Return what a batch makes of stories; one joins at each step."""
    batch, members = Batch(model, most=6), []
    for ids in [story_ids(data, story).to(model.device) for story in STORIES]:
        text = prepare_text(model, ids, max_new_tokens=NEW, do_sample=False)
        known = Prophet(VOCAB, [[*truth[0].tolist(), *range(8)] for truth in truths], depth=20)
        members.append(Member(text, known, Fixed(24)))
        batch.join(members[-1])
        batch.step()
    while len(batch):
        assert not [outcome.error for outcome in batch.step() if outcome.error]
    return [member.generated.text.ids for member in members]


def test_batches_are_captured_too(data: Path, played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "captures", lambda device: True)
    model = stories(data)
    truths = [plainly(model, story_ids(data, story)) for story in STORIES]
    for most in (graph_runner.MAX_GRAPHS, 3):
        monkeypatch.setattr(graph_runner, "MAX_GRAPHS", most)
        assert generated(data, model, truths) == [truth[0].tolist() for truth in truths]
    assert {shape.texts for shape in played.shapes} == {1, 2, 4, 8}
    assert {shape.rows for shape in played.shapes} <= set(BUCKETS)
    assert set(played.replayed) == set(played.captured)
    assert len(played.captured) > len(set(played.captured)), "what was dropped is captured again"


def test_the_next_batch_of_a_model_finds_its_graphs(
    data: Path, played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "captures", lambda device: True)
    model, ids = stories(data), story_ids(data)
    truth = plainly(model, ids)[0].tolist()
    for _ in range(2):
        rows: Any = generate(model, ids.expand(3, -1), max_new_tokens=NEW, do_sample=False)
        assert rows.tolist() == [truth] * 3
    assert len(played.captured) == 1, "of four texts, one of them padding, and one row"
    batches._IDLE.clear()


def test_memory_of_another_batch_is_no_limit(
    data: Path, played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "captures", lambda device: True)
    model, ids = stories(data), story_ids(data)
    truth = plainly(model, ids)[0].tolist()
    for texts in (16, 2):
        rows: Any = generate(model, ids.expand(texts, -1), max_new_tokens=NEW, do_sample=False)
        assert rows.tolist() == [truth] * texts
    monkeypatch.setattr(pools.CachePool, "most_tokens", lambda pool: 0)  # the batch before has it all
    length = batches._IDLE[model].pool.length
    assert Batch(model, most=2).positions == length - MAX_ROWS
    batches._IDLE.clear()


def test_attention_sees_more_columns_as_the_text_grows(data: Path, played: Played) -> None:
    model, ids = stories(data), story_ids(data)
    truth = plainly(model, ids, min_new_tokens=480, max_new_tokens=480)
    drafter = Prophet(VOCAB, [truth[0].tolist()], depth=20)
    assert torch.equal(with_graphs(model, ids, drafter, max_new_tokens=480, min_new_tokens=480), truth)
    assert {width for _, width in played.captured} == {256, 512}
    assert graphs._RUNNERS[model].pool.length >= 512


def test_what_a_graph_overwrites_has_been_copied(data: Path, played: Played) -> None:
    test_what_is_returned_beside_the_tokens(data)
    assert played.replayed
    test_sampled_output_is_that_of_plain_generate(data)
    test_a_pass_yields_what_it_yields_without_buffers(data, 7)


def test_inference_mode_with_graphs(data: Path, played: Played) -> None:
    test_inference_mode_and_gradients_do_not_mix_up_the_buffers(data)
    assert played.replayed


def test_what_cannot_be_captured_runs_without(
    data: Path, played: Played, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    @contextmanager
    def broken(graph: Graph, **options: Any) -> Iterator[None]:
        yield
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(torch.cuda, "graph", broken)
    model, ids = stories(data), story_ids(data)
    truth = plainly(model, ids)
    with caplog.at_level(logging.WARNING, "draftstore"):
        assert torch.equal(with_graphs(model, ids, Prophet(VOCAB, [truth[0].tolist()])), truth)
    shapes = len(graphs._RUNNERS[model]._captured)
    assert len(caplog.records) == shapes > 1
    assert (
        "LlamaForCausalLM cannot be captured as a CUDA graph (operation not permitted" in caplog.messages[0]
    )
    assert not played.replayed


# --- on a GPU ---


@needs_gpu
def test_on_a_gpu_batches_give_the_tokens_of_plain_generate(data: Path) -> None:
    model = moved(stories(data), "cuda")
    try:
        truths = [
            plainly(model, story_ids(data, story).to("cuda"), cache_implementation="dynamic")
            for story in STORIES
        ]
        assert generated(data, model, truths) == [truth[0].tolist() for truth in truths]
    finally:
        moved(model, "cpu")


@needs_gpu
@pytest.mark.parametrize("name", DRAFTERS)
def test_on_a_gpu_graphs_give_the_tokens_of_plain_generate(data: Path, name: str) -> None:
    model = moved(stories(data), "cuda")
    try:
        for story in STORIES[:3]:
            ids = story_ids(data, story).to("cuda")
            truth = plainly(model, ids, cache_implementation="static", disable_compile=True)
            drafter = DRAFTERS[name](truth[0].tolist())
            output: Any = generate(
                model,
                ids,
                drafter=drafter,
                max_new_tokens=NEW,
                do_sample=False,
                cache_implementation="static",
            )
            assert torch.equal(output, truth)
            assert graphs._RUNNERS[model]._captured, "graphs are what generate takes by itself"
    finally:
        graphs._RUNNERS.pop(model, None)
        moved(model, "cpu")


@needs_gpu
def test_on_a_gpu_a_graph_gives_the_logits_of_the_same_pass_without(data: Path) -> None:
    model = moved(stories(data, torch.float32), "cuda")
    try:
        ids = story_ids(data).to("cuda")
        rng = np.random.default_rng(0)
        ours, theirs = GraphForward(prefilled(model, ids)), TreeForward(prefilled(model, ids))
        wants = Wants(best=True, candidates=True, hidden=True)
        with torch.no_grad():
            for nodes in (0, 1, 3, 20, 63, 100, 127, 20, 0):
                tree = random_tree(nodes, rng)
                tokens = np.append(rng.integers(0, VOCAB), tree.tokens).astype(np.int64)
                mine, others = ours.run(tokens, tree, wants), theirs.run(tokens, tree, wants)
                for row in range(nodes + 1):
                    torch.testing.assert_close(mine.logits(row), others.logits(row), rtol=1e-3, atol=1e-3)
                assert len(mine.best()) == len(mine.candidates()) == nodes + 1
                path = accept_greedy(tree, np.array(mine.best())).path
                ours.keep([0, *(node + 1 for node in path)])
                theirs.keep([0, *(node + 1 for node in path)])
        ours.close()
    finally:
        graphs._RUNNERS.pop(model, None)
        moved(model, "cpu")
