"""The cost curve of a model on this device: seconds per forward pass by texts and rows, measured and stored.

    curve = find_curve(model)                   stored by `draftstore tune`, or None
    planner = CostPlanner(curve)                see `draftstore.decoding.budget`

A pass is timed as in decoding: over trees, with a filled cache, until its tokens are on the host. Sizes are
interleaved, so that a slowdown of the machine affects all of them; the lower quartile counts. If it is far above the
fastest pass, other work is disturbing the measurement: passes are repeated, and finally rejected.
"""

import hashlib
import json
import logging
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch

from draftstore.decoding.curve import BATCHES, CONTEXT, REPEATS, SPREAD, Conditions, CostCurve, Costs, now
from draftstore.errors import CurveError, ModelError, counted
from draftstore.hf.checks import takes_single_texts, vocab_size
from draftstore.hf.exactness import require_exact
from draftstore.hf.loading import positions_of
from draftstore.hf.passes import Wants
from draftstore.hf.runner import (
    BUCKETS,
    LEAST_WIDTH,
    MAX_ROWS,
    TEXTS,
    Drafted,
    Runner,
    new_runner,
    padded,
    takes_graphs,
)
from draftstore.storage.files import cache_folder
from draftstore.storage.report import OnProgress, ignore
from draftstore.trees.tree import DraftTree

WARM_UPS, ATTEMPTS = 2, 4
FOLDER, SEED = "curves", 0

LOG = logging.getLogger(__name__)


class Size(NamedTuple):
    """The size of a pass."""

    texts: int
    rows: int

    def __str__(self) -> str:
        """Describe it in a message."""
        return counted(self.rows, "row") + (f" of each of {self.texts} texts" if self.texts > 1 else "")


def conditions_of(model: Any, name: str | None = None) -> Conditions:
    """Return the conditions of a model's cost curve."""
    return Conditions(
        model=name or str(model.config.name_or_path) or type(model).__name__,
        shape=_shape_of(model),
        device=_device_name(model.device),
        dtype=str(model.dtype).removeprefix("torch."),
        attention=str(model.config.get_text_config(decoder=True)._attn_implementation),
        threads=torch.get_num_threads() if model.device.type == "cpu" else 0,
    )


def _shape_of(model: Any) -> str:
    """Return a hash of the model's type and its parameters' names, shapes and types."""
    parameters = [[name, list(each.shape), str(each.dtype)] for name, each in model.named_parameters()]
    text = json.dumps([model.config.model_type, *parameters])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "cpu":
        file = Path("/proc/cpuinfo")
        lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
        named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        return named[0] if named else platform.processor() or platform.machine()
    return device.type


def curve_path(conditions: Conditions) -> Path:
    """Return the path of a model's stored curve."""
    parts = [getattr(conditions, name) for name in ("shape", "device", "dtype", "attention", "threads")]
    digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
    return cache_folder(FOLDER) / f"{digest}.json"


def find_curve(model: Any) -> CostCurve | None:
    """Return the stored curve of a model on its device; None if there is none, or it is unusable."""
    conditions = conditions_of(model)
    path = curve_path(conditions)
    if not path.is_file():
        return None
    try:
        return CostCurve.load(path).require(conditions)
    except CurveError as error:
        LOG.warning("the cost curve is not used: %s", error)
        return None


def measure(
    model: Any,
    *,
    context: int = CONTEXT,
    repeats: int = REPEATS,
    spread: float = SPREAD,
    texts: Sequence[int] = BATCHES,
    rows: Sequence[int] = BUCKETS,
    name: str | None = None,
    on_pass: OnProgress = ignore,
) -> CostCurve:
    """Measure the cost curve of a model.

    Args:
        context: tokens in the cache; reduced if the model has no room for them and the largest pass.
        repeats: timed passes of each size; up to four times as many if they differ by more than `spread`.
        spread: how far the lower quartile may be above the fastest pass, as a share of it.
        texts: numbers of texts, besides one text alone; reduced to what fits in memory.
        rows: numbers of rows of each text, ascending, starting with 1; for several texts, those that a pass has room
            for.

    Raises:
        CurveError: passes differ too much for a reliable result.
        DecodingError: the model does not support drafts.
        ModelError: the model has no room for such passes.
    """
    require_exact(model)
    if (end := positions_of(model)) is not None:
        context = min(context, end - rows[-1])
    if context < 1:
        raise ModelError(f"the model has {end} positions; the largest pass of {rows[-1]} rows needs more")
    runner, texts = _filled_runner(model, context, texts)

    def timed(size: Size) -> float:
        begin = perf_counter()
        runner.run(drafted[size], Wants())[0].best()
        return perf_counter() - begin

    sizes = [Size(each, count) for each in texts for count in rows if each == 1 or count <= runner.room(each)]
    drafted = {size: tree_entry(size.rows, context, vocab_size(model), size.texts) for size in sizes}
    for size in WARM_UPS * sizes:
        timed(size)
    times: dict[Size, list[float]] = {size: [] for size in sizes}
    done, left = 0, sizes
    for _ in range(ATTEMPTS):
        total = done + repeats * len(left)
        for turn in range(repeats):
            for size in left if turn % 2 else left[::-1]:
                times[size].append(timed(size))
                done += 1
                on_pass(done, total)
        left = [size for size in sizes if _spread(times[size]) > spread]
        if not left:
            first, *batches = (_costs_of(each, times) for each in texts)
            made = conditions_of(model, name), context, now(), tuple(batches)
            return CostCurve(first.rows, first.seconds, runner.graphs, *made)
    worst = max(left, key=lambda size: _spread(times[size]))
    raise CurveError(
        f"forward passes over {worst} took {1000 * min(times[worst]):.1f} ms at best, and most of them "
        f"at least {1000 * _quartile(times[worst]):.1f} ms, so no curve is stored: stop other work on this machine "
        "and measure again, or allow larger differences",
        "spread",
    )


def _filled_runner(model: Any, context: int, texts: Sequence[int]) -> tuple[Runner, list[int]]:
    """Return a runner whose texts have `context` tokens, and the numbers of texts, of which one is 1, that fit."""
    length = -(-(context + MAX_ROWS) // LEAST_WIDTH) * LEAST_WIDTH
    room = new_runner(model, 1).pool.most_tokens() // length
    most = 1 if takes_single_texts(model) else max(1, room)
    sizes = [padded(each, TEXTS) for each in texts] if takes_graphs(model) else texts
    texts = sorted({1, *(min(each, 1 << (most.bit_length() - 1)) for each in sizes)})
    runner = new_runner(model, texts[-1])
    runner.pool.resize(length, 0, 0)
    ids = np.random.default_rng(SEED).integers(vocab_size(model), size=context)
    runner.read(0, [ids], 0, Wants())
    for slot in range(1, texts[-1]):
        runner.pool.copy(0, slot, context)
    return runner, texts


def _costs_of(texts: int, times: Mapping[Size, list[float]]) -> Costs:
    found = {size.rows: _quartile(each) for size, each in times.items() if size.texts == texts}
    return Costs(texts, tuple(found), tuple(found.values()))


def _quartile(times: list[float]) -> float:
    return sorted(times)[len(times) // 4]


def _spread(times: list[float]) -> float:
    """Return how far the lower quartile is above the fastest pass, as a share of it."""
    return _quartile(times) / min(times) - 1


def tree_entry(count: int, past: int, vocab_size: int, texts: int = 1) -> Drafted:
    """Return the input of a pass over `count` rows of each text: a binary tree."""
    nodes = np.arange(count - 1)
    tokens = (nodes * 7919 % vocab_size).astype(np.int32)
    parents = ((nodes + 1) // 2 - 1).astype(np.int16)
    tree = DraftTree(tokens, parents, np.zeros(count - 1, np.uint8))
    return Drafted.of([(0, tree, past)] * texts)
