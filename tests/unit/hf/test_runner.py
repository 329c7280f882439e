"""Passes in the shapes of CUDA graphs: memory that stays with its model, and what only a GPU can show.

Without a GPU, passes are padded as for graphs but not captured, and the tests at the end are skipped. `test_matrix`
shows that texts are the same as from passes in their own shapes.
"""

import gc
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache

from draftstore.decoding.budget import Fixed
from draftstore.drafting.drafter import Drafter
from draftstore.drafting.request import RequestDrafter
from draftstore.hf import generate, pools, runner
from draftstore.hf.attention import FULL, SLIDING, views_of
from draftstore.hf.batches import Batch
from draftstore.hf.members import Member, prepare_text
from draftstore.hf.passes import Wants
from draftstore.hf.runner import BUCKETS, MAX_ROWS, PassShape, Runner
from draftstore.recycling.drafter import RecyclingDrafter
from tests.fakes.adversaries import Prophet, RandomTrees
from tests.fakes.hf_models import STORIES, needs_gpu, on_a_gpu, shapes_of_graphs, stories, story_ids, tiny

VOCAB = 512
NEW = 48
PROMPT = torch.tensor([[9, 10, 11]])
OPTIONS: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}


@pytest.fixture
def padding(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[PassShape]]:
    """Run passes in the shapes of graphs; return those shapes."""
    shapes: list[PassShape] = []
    compute = Runner._compute

    def noted(own: Runner, shape: PassShape, start: int | None = None) -> Any:
        shapes.append(shape)
        return compute(own, shape, start)

    monkeypatch.setattr(Runner, "_compute", noted)
    with shapes_of_graphs():
        yield shapes


def plain_text(model: Any, ids: torch.Tensor, **options: Any) -> list[int]:
    """Return what plain generate returns."""
    text: list[int] = model.generate(ids.to(model.device), **(OPTIONS | options))[0].tolist()
    return text


def drafted(model: Any, ids: torch.Tensor, drafter: Drafter | None, **options: Any) -> list[list[int]]:
    texts: Any = generate(model, ids.to(model.device), drafter=drafter, **(OPTIONS | options))
    found: list[list[int]] = texts.tolist()
    return found


# --- the shapes of graphs ---


def test_attention_sees_more_columns_as_the_text_grows(padding: list[PassShape]) -> None:
    model, longer = tiny(vocab_size=VOCAB), {"max_new_tokens": 300}
    truth = plain_text(model, PROMPT, **longer)
    assert drafted(model, PROMPT, Prophet(VOCAB, [truth], depth=20), **longer) == [truth]
    assert {shape.width for shape in padding} == {256, 512}
    assert {shape.rows for shape in padding} <= set(BUCKETS)


def test_graphs_are_the_same_whatever_texts_need(padding: list[PassShape]) -> None:
    model = tiny(vocab_size=VOCAB)
    for drafter in (None, RequestDrafter(VOCAB), RecyclingDrafter(VOCAB)):
        for options in ({}, {"do_sample": True}):
            torch.manual_seed(1)
            truth = plain_text(model, PROMPT, **options)
            torch.manual_seed(1)
            assert drafted(model, PROMPT, drafter, **options) == [truth]
    assert {shape.wants for shape in padding} == {Wants(best=True, candidates=True)}


# --- memory and graphs go on with their model ---


def runner_after(model: Any, texts: int, **options: Any) -> Runner:
    """Decode some texts; return what ran the passes."""
    truth = plain_text(model, PROMPT, **options)
    assert drafted(model, PROMPT.expand(texts, -1), RequestDrafter(VOCAB), **options) == [truth] * texts
    return runner._IDLE[model][1]


def test_the_next_batch_of_a_model_finds_memory_and_graphs(padding: list[PassShape]) -> None:
    model: Any = tiny.__wrapped__(vocab_size=VOCAB)
    first = runner_after(model, 3)
    assert runner_after(model, 3, max_new_tokens=9) is first
    assert runner_after(model, 2) is not first, "of another number of texts"
    second = runner_after(model, 2)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    assert runner_after(model, 2) is not second, "of weights that are elsewhere now"
    last = weakref.ref(runner._IDLE[model][1])
    del model, first, second
    gc.collect()
    assert last() is None


def test_memory_already_allocated_does_not_count_as_a_limit(
    padding: list[PassShape], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny(vocab_size=VOCAB)
    runner_after(model, 16)
    length = runner_after(model, 2).pool.length
    monkeypatch.setattr(pools.CachePool, "most_tokens", lambda _pool: 0)  # the batch before has it all
    assert Batch(model, most=2).positions == length - MAX_ROWS


def test_inference_mode_and_gradients_do_not_mix_up_the_buffers(padding: list[PassShape]) -> None:
    model = tiny(vocab_size=VOCAB)
    with torch.inference_mode():
        first = runner_after(model, 1)
    assert runner_after(model, 1) is first


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


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 64}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 8.0}


def run_without_values(architecture: str, shapes: Sequence[PassShape], **changes: Any) -> set[str]:
    """Run passes on the device `meta`, where tensors have no values; return what met tensors of the host."""
    model: Any = torch.nn.Module.to(tiny.__wrapped__(architecture, dtype=torch.bfloat16, **changes), "meta")
    cache = DynamicCache(config=model.config)
    model(torch.zeros((1, 1), dtype=torch.int64, device="meta"), past_key_values=cache)
    pool = pools.CachePool(cache, 9, MAX_ROWS)
    pool.resize(256, 0, 0)
    captured = Runner(model, pool, views_of(model.config), graphs=True)
    with torch.no_grad(), OnDevice() as seen:
        for shape in shapes:
            logits = captured._compute(shape).logits
            assert logits.shape == (shape.texts * shape.rows, 64)
    strangers: set[str] = seen.strangers
    return strangers


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("llama", {}),
        ("llama", {"rope_parameters": YARN}),
        ("qwen3", {}),
        ("gemma3_text", {"sliding_window": 8, "layer_types": [SLIDING, FULL]}),
    ],
)
def test_no_value_is_read_in_a_pass(architecture: str, changes: dict[str, Any]) -> None:
    """A graph is recorded without values, on one device: on `meta` a pass that needs more fails."""
    wants = (Wants(), Wants(candidates=True, hidden=True), Wants(best=False))
    shapes = [PassShape(*size, 256, want) for size in ((1, 1), (1, 128), (4, 16), (8, 64)) for want in wants]
    assert run_without_values(architecture, shapes, **changes) == set()


def test_a_pass_that_reads_values_would_be_noticed() -> None:
    with pytest.raises(RuntimeError, match="meta tensors"):
        run_without_values("llama", [PassShape(1, 1, 256, Wants())], rope_parameters=DYNAMIC)


# --- on a GPU ---

DRAFTERS: dict[str, Callable[[list[int]], Drafter | None]] = {
    "none": lambda truth: None,
    "random": lambda truth: RandomTrees(VOCAB),
    "half a prophet": lambda truth: Prophet(VOCAB, [truth], error_rate=0.5),
    "prophet": lambda truth: Prophet(VOCAB, [truth], depth=12),
    "recycling": lambda truth: RecyclingDrafter(VOCAB),
}


def together(data: Path, model: Any) -> tuple[list[list[int]], list[list[int]]]:
    """Decode stories together, of which one joins at each step; return them, and what plain generate returns."""
    prompts = [story_ids(data, story).to(model.device) for story in STORIES]
    truths = [plain_text(model, ids) for ids in prompts]
    batch, members = Batch(model, most=5), list[Member]()
    for ids in prompts:
        known = Prophet(VOCAB, [[*truth, *range(8)] for truth in truths], depth=20, error_rate=0.1)
        members.append(prepare_text(model, ids, **OPTIONS).draft(known, Fixed(24)))
        batch.join(members[-1])
        batch.step()
    while len(batch):
        assert not [result for _, result in batch.step() if isinstance(result, Exception)]
    batch.close()
    return [member.text.ids.tolist() for member in members], truths


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_graphs_give_the_texts_of_plain_generate(
    data: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if dtype == torch.float32:
        monkeypatch.setattr(runner, "MAX_GRAPHS", 3)  # those dropped are captured again
    with on_a_gpu(stories(data, dtype)) as model:
        for make in DRAFTERS.values():
            for story in STORIES[:3]:
                truth = plain_text(model, story_ids(data, story))
                assert drafted(model, story_ids(data, story), make(truth)) == [truth]
        _, alone = runner._IDLE[model]
        found, truths = together(data, model)
        assert found == truths
        for graphs in (alone._captured, runner._IDLE[model][1]._captured):
            assert len(graphs) > 1
            assert None not in graphs.values()
            assert {shape.wants for shape in graphs} == {Wants(best=True, candidates=True)}


@needs_gpu
def test_uncapturable_models_run_without_graphs(
    data: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compute = Runner._compute

    def reading(own: Runner, *args: Any) -> Any:
        own._integers.sum().item()  # no graph may read a value
        return compute(own, *args)

    monkeypatch.setattr(Runner, "_compute", reading)
    with on_a_gpu(stories(data)) as model, caplog.at_level(logging.WARNING, "draftstore"):
        truth = plain_text(model, story_ids(data))
        assert drafted(model, story_ids(data), Prophet(VOCAB, [truth])) == [truth]
        shapes = runner._IDLE[model][1]._captured
    assert len(caplog.records) == len(shapes) > 1
    assert "LlamaForCausalLM cannot be captured as a CUDA graph" in caplog.messages[0]
