"""The part `curve`: milliseconds per pass by texts and rows, with and without the 8 candidates of each row.

A pass runs as in `draftstore.hf.batches`, over a binary tree in every text, until its tokens are on the host.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any
from unittest.mock import patch

import numpy as np

from benchmarks.gpu.sheet import POSITIONS, Sheet, free
from draftstore.hf import runner
from draftstore.hf.passes import Entry, Wants
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
            with _runner(sheet.bench.model(sheet.shape), texts, context, extent.together) as passes:
                for rows, name in names.items():
                    sheet.cell(name, partial(_pass, passes, texts, rows, context, extent.repeats))


@contextmanager
def _runner(model: Any, texts: int, context: int, rows: int) -> Iterator[runner.Runner]:
    """Yield a runner of passes of at most so many rows, with its own pool."""
    with patch.object(runner, "MAX_TOGETHER", rows):
        passes = runner.new_runner(model, max(texts, 2))
        passes.pool.resize(
            max(context, POSITIONS) + runner.MAX_ROWS, 0, 0
        )  # as in decoding: more than a pass sees
        yield passes
    free()


def _pass(passes: runner.Runner, texts: int, rows: int, context: int, repeats: int) -> dict[str, Any]:
    """Return the median time of a pass over a binary tree in every text, without the first one, which captures."""
    nodes = np.arange(rows - 1)
    parents = ((nodes + 1) // 2 - 1).astype(np.int16)
    tree = DraftTree(nodes.astype(np.int32), parents, np.zeros(rows - 1, np.uint8))
    entry = Entry(np.arange(rows, dtype=np.int64), tree, context)
    found: dict[str, Any] = {"context": context, "texts": texts, "rows": rows}
    for name, wants in (("milliseconds", Wants()), ("with_candidates", Wants(candidates=True))):
        times = []
        for _ in range(2 + repeats):
            begin = perf_counter()
            passes.run([entry] * texts, wants)[0].best()
            times.append(perf_counter() - begin)
        found[name] = round(1000 * median(times[2:]), 4)
    return found
