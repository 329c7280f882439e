"""The part `curve`: milliseconds of a pass by its texts and rows, with graphs and eager, beside the roofline.

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

from benchmarks.gpu.forced import SHAPES, Shape
from benchmarks.gpu.sheet import POSITIONS, Sheet, free, seconds_of
from draftstore.hf import graph_runner
from draftstore.hf.graph_runner import GraphRunner
from draftstore.hf.pass_shapes import MAX_ROWS, Entry
from draftstore.hf.passes import Wants
from draftstore.hf.pools import CachePool
from draftstore.trees.tree import DraftTree

WAYS = ("graphs", "eager")


def run(sheet: Sheet) -> None:
    """Measure the curves of one shape."""
    extent = sheet.bench.extent
    device = sheet.cell("device", lambda: _device_limits(extent.matrix, extent.copied))
    for context in extent.contexts:
        for way in WAYS if context == extent.contexts[0] else WAYS[:1]:
            for texts in extent.batches:
                sizes = [rows for rows in extent.rows if texts * rows <= extent.together]
                names = {rows: f"{way}, context {context}, {texts} x {rows}" for rows in sizes}
                if all(sheet.known(name) for name in names.values()):
                    continue
                model = sheet.bench.model(sheet.shape)
                with runner_of(model, texts, context, extent.together, eager=way == "eager") as runner:
                    for rows, name in names.items():
                        about = {"way": way, "context": context, "texts": texts, "rows": rows}
                        if device is not None:
                            about |= _roofline(
                                SHAPES[sheet.shape], sheet.bench.vocab_size, device, texts, rows, context
                            )
                        sheet.cell(name, partial(_timed, about, runner, texts, rows, context, extent.repeats))


def _timed(about: dict[str, Any], *pass_: Any) -> dict[str, Any]:
    return about | time_pass(*pass_)


@contextmanager
def runner_of(
    model: Any, texts: int, context: int, rows: int, *, eager: bool = False
) -> Iterator[GraphRunner]:
    """Yield a runner of passes of at most so many rows, with a pool of its own."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=torch.zeros((1, 1), dtype=torch.int64, device=model.device), past_key_values=cache)
    capturing = patch.object(graph_runner, "captures", lambda _: False) if eager else nullcontext()
    with capturing, patch.object(graph_runner, "MAX_TOGETHER", rows):
        length = max(context, POSITIONS) + MAX_ROWS  # as in decoding: more than a pass sees
        pool = CachePool(cache.layers[0], len(cache.layers), length, MAX_ROWS, max(texts, 2))
        yield GraphRunner(model, pool, 0)
    free()


def time_pass(
    runner: GraphRunner, texts: int, rows: int, context: int, repeats: int, wants: Wants | None = None
) -> dict[str, Any]:
    """Return the median of a pass over a binary tree in every text; the first one, which captures, is not in it."""
    nodes = np.arange(rows - 1)
    tree = DraftTree(
        nodes.astype(np.int32), ((nodes + 1) // 2 - 1).astype(np.int16), np.zeros(rows - 1, np.uint8)
    )
    entry = Entry(np.arange(rows, dtype=np.int64), tree, context, context)

    def once() -> float:
        begin = perf_counter()
        runner.run([entry] * texts, wants or Wants())[0].best()
        return perf_counter() - begin

    once()
    once()
    return {"milliseconds": round(1000 * median(once() for _ in range(repeats)), 4)}


def _device_limits(size: int, copied: int) -> dict[str, Any]:
    """Measure bandwidth and peak."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    source = torch.ones(copied, dtype=torch.int8, device=device)
    copy = seconds_of(partial(torch.empty_like(source).copy_, source), 10)
    left = torch.randn(size, size, device=device).to(dtype)
    product = seconds_of(partial(torch.matmul, left, left), 10)
    return {
        "gigabytes_per_second": round(2 * copied / copy / 1e9, 3),
        "teraflops": round(2 * size**3 / product / 1e12, 6),
        "cell_bytes": dtype.itemsize,
    }


def _roofline(
    shape: Shape, vocab_size: int, device: dict[str, Any], texts: int, rows: int, context: int
) -> dict[str, Any]:
    """Return the least milliseconds of a pass on this device."""
    width = shape.hidden // shape.heads
    own = shape.hidden * (shape.hidden * 2 + 2 * width * shape.key_value_heads + 3 * shape.inner)
    weights = shape.layers * own + shape.hidden * vocab_size
    pairs = texts * rows * (context + rows)
    kept = 2 * shape.layers * shape.key_value_heads * width * texts * (context + rows)
    computed = 2 * weights * texts * rows + 4 * shape.layers * shape.hidden * pairs
    by_memory = device["cell_bytes"] * (weights + kept) / device["gigabytes_per_second"] / 1e6
    by_compute = computed / device["teraflops"] / 1e9
    return {"roofline_milliseconds": round(max(by_memory, by_compute), 4)}
