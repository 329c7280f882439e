"""The part `curve`: milliseconds of a pass by its texts and rows, with the 8 candidates of each row or without.

A pass is run as `draftstore.hf.batches` runs it, over a binary tree in every text, until its tokens are on the host.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from transformers import DynamicCache

from benchmarks.gpu.sheet import POSITIONS, Sheet, free
from draftstore.hf import graph_runner
from draftstore.hf.graph_runner import GraphRunner
from draftstore.hf.pass_shapes import MAX_ROWS, Entry
from draftstore.hf.passes import Wants
from draftstore.hf.pools import CachePool
from draftstore.trees.tree import DraftTree


def run(sheet: Sheet) -> None:
    """Measure the curves of one shape."""
    extent = sheet.bench.extent
    for context in extent.contexts:
        for texts in extent.batches:
            sizes = [rows for rows in extent.rows if texts * rows <= extent.together]
            names = {rows: f"context {context}, {texts} x {rows}" for rows in sizes}
            if all(sheet.known(name) for name in names.values()):
                continue
            with _runner(sheet.bench.model(sheet.shape), texts, context, extent.together) as runner:
                for rows, name in names.items():
                    sheet.cell(name, partial(_pass, runner, texts, rows, context, extent.repeats))


@contextmanager
def _runner(model: Any, texts: int, context: int, rows: int) -> Iterator[GraphRunner]:
    """Yield a runner of passes of at most so many rows, with a pool of its own."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=torch.zeros((1, 1), dtype=torch.int64, device=model.device), past_key_values=cache)
    with patch.object(graph_runner, "MAX_TOGETHER", rows):
        length = max(context, POSITIONS) + MAX_ROWS  # as in decoding: more than a pass sees
        pool = CachePool(cache.layers[0], len(cache.layers), length, MAX_ROWS, max(texts, 2))
        yield GraphRunner(model, pool, 0)
    free()


def _pass(runner: GraphRunner, texts: int, rows: int, context: int, repeats: int) -> dict[str, Any]:
    """Return the median of a pass over a binary tree in every text; the first one, which captures, is not in it."""
    nodes = np.arange(rows - 1)
    parents = ((nodes + 1) // 2 - 1).astype(np.int16)
    tree = DraftTree(nodes.astype(np.int32), parents, np.zeros(rows - 1, np.uint8))
    entry = Entry(np.arange(rows, dtype=np.int64), tree, context, context)
    found: dict[str, Any] = {"context": context, "texts": texts, "rows": rows}
    for name, wants in (("milliseconds", Wants()), ("with_candidates", Wants(candidates=True))):
        times = []
        for _ in range(2 + repeats):
            begin = perf_counter()
            runner.run([entry] * texts, wants)[0].best()
            times.append(perf_counter() - begin)
        found[name] = round(1000 * median(times[2:]), 4)
    return found
