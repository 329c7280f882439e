"""The part `curve`: seconds of a pass by its texts, rows and way, attention alone in several ways, and the roofline.

A pass is run as `draftstore.hf.batches` runs it, over a binary tree in every text, until its tokens are on the host.
The roofline is the larger of two times: the weights, keys and values read once at the bandwidth of a copy, and the
products computed at the rate of a large matrix product, both measured here.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from transformers import DynamicCache

from benchmarks.forced import SHAPES, Shape
from benchmarks.gpu_attention import attention_ways
from benchmarks.gpu_bench import POSITIONS, Part, free
from benchmarks.gpu_sheet import seconds_of
from draftstore.hf import graph_runner
from draftstore.hf.graph_runner import GraphRunner
from draftstore.hf.pass_shapes import MAX_ROWS, Entry
from draftstore.hf.passes import Wants
from draftstore.hf.pools import CachePool
from draftstore.trees.tree import DraftTree
from tests.fakes.hf_models import uncompiled

WAYS = ("graphs", "eager", "flex")
FLEX = ((1, 1), (1, 16), (1, 64), (8, 8), (8, 32), (32, 4), (32, 16))
"""Texts and rows that flex_attention is compiled for: seconds each."""
ATTENTION = ((1, 64), (8, 16), (32, 4))
"""Texts and rows at which attention alone is measured."""


def run(part: Part) -> None:
    """Measure the curves of one shape."""
    extent = part.extent
    device = part.cell("device", lambda: _device_limits(extent.matrix, extent.copied))
    for context in extent.contexts:
        for way in WAYS:
            if way != "eager" or context == extent.contexts[0]:
                _measure_way(part, way, context, device)
        for texts, rows in ATTENTION if len(extent.batches) > 2 else ((2, 4),):
            size = (texts, rows, context + rows)
            part.cell(
                f"attention, context {context}, {texts} x {rows}", partial(_attention, part, size),
            )  # fmt: skip


def _measure_way(part: Part, way: str, context: int, device: dict[str, Any] | None) -> None:
    """Measure the passes of one way; where graphs cannot be captured, they are eager."""
    extent = part.extent
    for texts in extent.batches:
        sizes = [rows for rows in extent.rows if texts * rows <= extent.together]
        if way == "flex":
            sizes = [rows for rows in sizes if (texts, rows) in FLEX]
        names = {rows: f"{way}, context {context}, {texts} x {rows}" for rows in sizes}
        if all(part.known(name) for name in names.values()):
            continue
        with runner_of(part.bench.model(part.shape), texts, context, extent.together, way) as runner:
            for rows, name in names.items():
                about = {"way": way, "context": context, "texts": texts, "rows": rows}
                least = _roofline(SHAPES[part.shape], part.bench.vocab_size, device, texts, rows, context)
                part.cell(
                    name,
                    partial(_timed, runner, (texts, rows, context), extent.repeats, about | least),
                )


def _timed(
    runner: GraphRunner, size: tuple[int, int, int], repeats: int, about: dict[str, Any]
) -> dict[str, Any]:
    return about | time_pass(runner, *size, repeats)


def _attention(part: Part, size: tuple[int, int, int]) -> dict[str, Any]:
    model = part.bench.model(part.shape)
    return attention_ways(SHAPES[part.shape], *size, model.dtype, model.device, part.extent.repeats)


@contextmanager
def runner_of(model: Any, texts: int, context: int, most: int, way: str) -> Iterator[GraphRunner]:
    """Yield a runner with a pool of its own."""
    attention = "flex_attention" if way == "flex" else "sdpa"
    usual = model.config._attn_implementation
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=torch.zeros((1, 1), dtype=torch.int64, device=model.device), past_key_values=cache)
    capturing = patch.object(graph_runner, "captures", lambda _: False) if way == "eager" else nullcontext()
    limits = patch.object(graph_runner, "MAX_TOGETHER", most)
    compiled = uncompiled() if way == "flex" and model.device.type == "cpu" else nullcontext()
    model.set_attn_implementation(attention)
    try:
        with capturing, limits, compiled, patch.object(torch._dynamo.config, "recompile_limit", 64):
            length = max(context, POSITIONS) + MAX_ROWS  # as in decoding: more than a pass sees
            pool = CachePool(cache.layers[0], len(cache.layers), length, MAX_ROWS, max(texts, 2))
            yield GraphRunner(model, pool, 0)
    finally:
        model.set_attn_implementation(usual)
        free()


def time_pass(
    runner: GraphRunner, texts: int, rows: int, context: int, repeats: int, wants: Wants | None = None
) -> dict[str, Any]:
    """Return the seconds of a pass over a binary tree in every text; the first one, which captures, is left out."""
    nodes = np.arange(rows - 1)
    tree = DraftTree(
        nodes.astype(np.int32), ((nodes + 1) // 2 - 1).astype(np.int16), np.zeros(rows - 1, np.uint8)
    )
    entry = Entry(np.arange(rows, dtype=np.int64), tree, context, context)
    wants = wants or Wants()

    def once() -> float:
        begin = perf_counter()
        runner.run([entry] * texts, wants)[0].best()
        return perf_counter() - begin

    first = once()
    once()
    times = [once() for _ in range(repeats)]
    return {
        "milliseconds": round(1000 * median(times), 4),
        "first_milliseconds": round(1000 * first, 2),
        "captured": any(each is not None for each in runner._captured.values()),
    }


def _device_limits(size: int, copied: int) -> dict[str, Any]:
    """Measure bandwidth and peak."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    source = torch.ones(copied, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    copy = seconds_of(partial(target.copy_, source), 10)
    left = torch.randn(size, size, device=device).to(dtype)
    product = seconds_of(partial(torch.matmul, left, left), 10)
    figures = {
        "gigabytes_per_second": round(2 * copied / copy / 1e9, 1),
        "teraflops": round(2 * size**3 / product / 1e12, 3),
        "dtype": str(dtype).removeprefix("torch."),
    }
    del source, target, left  # before the model comes
    free()
    return figures


def _roofline(
    shape: Shape, vocab_size: int, device: dict[str, Any] | None, texts: int, rows: int, context: int
) -> dict[str, Any]:
    """Return the least milliseconds of a pass on this device; empty if that was not measured."""
    if device is None:
        return {}
    width = shape.hidden // shape.heads
    own = shape.hidden * (shape.hidden * 2 + 2 * width * shape.key_value_heads + 3 * shape.inner)
    weights = shape.layers * own + shape.hidden * vocab_size
    cells = 2 if device["dtype"] == "bfloat16" else 4
    pairs = texts * rows * (context + rows)
    kept = 2 * shape.layers * shape.key_value_heads * width * texts * (context + rows)
    read = cells * (weights + kept)
    computed = 2 * weights * texts * rows + 4 * shape.layers * shape.hidden * pairs
    by_memory = read / device["gigabytes_per_second"] / 1e6
    by_compute = computed / device["teraflops"] / 1e9
    return {"roofline_milliseconds": round(max(by_memory, by_compute), 4)}
