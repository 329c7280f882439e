"""The cost curve of a model on this device: seconds of a forward pass by its rows, measured, stored and found again.

    curve = find_curve(model)                   stored by `draftstore tune`, or None
    planner = CostPlanner(curve)                see `draftstore.decoding.budget`

A pass is timed as in decoding: over a tree, with a filled cache, until its tokens are on the host. Numbers of rows are
interleaved, so that a slowdown of the machine affects all of them; the median counts.
"""

import hashlib
import json
import logging
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, StaticCache

from draftstore.decoding.curve import Conditions, CostCurve, now
from draftstore.errors import CurveError, ModelError
from draftstore.hf.caches import rollback_cache
from draftstore.hf.choosing import Text
from draftstore.hf.generation import default_forward
from draftstore.hf.graphs import GraphForward
from draftstore.hf.loading import positions_of
from draftstore.hf.pass_shapes import BUCKETS
from draftstore.hf.passes import Wants
from draftstore.hf.targets import Forward, Prefilled
from draftstore.storage.cache import cache_folder
from draftstore.trees.tree import DraftTree

ROWS = BUCKETS
CACHES = ("dynamic", "static")
CONTEXT = 512
REPEATS = 9
WARM_UPS = 2
FOLDER = "curves"
SEED = 0

LOG = logging.getLogger(__name__)


def conditions_of(model: Any, cache: str | None = None, name: str | None = None) -> Conditions:
    """Return the conditions of a model's cost curve."""
    on_cpu = model.device.type == "cpu"
    return Conditions(
        model=name or str(model.config.name_or_path) or type(model).__name__,
        shape=_shape_of(model),
        device=_device_name(model.device),
        dtype=str(model.dtype).removeprefix("torch."),
        attention=str(model.config.get_text_config(decoder=True)._attn_implementation),
        cache=cache or ("dynamic" if on_cpu else "static"),
        threads=torch.get_num_threads() if on_cpu else 0,
    )


def _shape_of(model: Any) -> str:
    """Return a hash of the model's type, and of its parameters' names, shapes and types."""
    parameters = [[name, list(each.shape), str(each.dtype)] for name, each in model.named_parameters()]
    text = json.dumps([model.config.model_type, *parameters])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _device_name(device: torch.device) -> str:
    """Return the name of a processor."""
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
    parts = [
        getattr(conditions, name) for name in ("shape", "device", "dtype", "attention", "cache", "threads")
    ]
    digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
    return cache_folder(FOLDER) / f"{digest}.json"


def find_curve(model: Any, cache: str | None = None) -> CostCurve | None:
    """Return the stored curve of a model on its device; None if there is none, or it is unusable."""
    conditions = conditions_of(model, cache)
    path = curve_path(conditions)
    if not path.is_file():
        return None
    try:
        return load_curve(path, conditions)
    except CurveError as error:
        LOG.warning("the cost curve is not used: %s", error)
        return None


def load_curve(path: Path, conditions: Conditions) -> CostCurve:
    """Read a model's curve from a file."""
    curve = CostCurve.load(path)
    curve.require(conditions)
    return curve


@torch.no_grad()
def measure(
    model: Any,
    *,
    context: int = CONTEXT,
    repeats: int = REPEATS,
    rows: Sequence[int] = ROWS,
    cache: str | None = None,
    name: str | None = None,
    on_pass: Callable[[int, int], None] = lambda _done, _total: None,
) -> CostCurve:
    """Measure the cost curve of a model.

    Args:
        model: model of transformers, on its device.
        context: tokens in the cache; fewer if the model has no room for them and the largest pass.
        repeats: timed passes for each number of rows.
        rows: numbers of rows, ascending, starting with 1.
        cache: `dynamic` or `static`, see `conditions_of`.
        name: name of the model.
        on_pass: called after every pass with the passes done and the total.

    Raises:
        ModelError: the model has no room for such passes.
    """
    conditions = conditions_of(model, cache, name)
    context = _room_for(model, context, rows[-1])
    forward = default_forward(_prefill(model, context, rows[-1], conditions.cache))
    times: dict[int, list[float]] = {count: [] for count in rows}
    total, done = (WARM_UPS + repeats) * len(rows), 0
    try:
        for turn in range(WARM_UPS + repeats):
            for count in rows if turn % 2 else rows[::-1]:
                seconds = _time_pass(forward, count, int(model.config.get_text_config().vocab_size))
                if turn >= WARM_UPS:
                    times[count].append(seconds)
                done += 1
                on_pass(done, total)
    finally:
        forward.close()
    seconds_by_rows = tuple(median(times[count]) for count in rows)
    padded = isinstance(forward, GraphForward)
    return CostCurve(tuple(rows), seconds_by_rows, padded, conditions, context, now())


def _room_for(model: Any, context: int, rows: int) -> int:
    """Return the number of tokens that fit into the cache."""
    end = positions_of(model)
    room = context if end is None else min(context, end - rows)
    if room < 1:
        raise ModelError(
            f"the model has {end} positions, expected more than {rows}, the tokens of the largest pass"
        )
    return room


def _prefill(model: Any, context: int, rows: int, cache: str) -> Prefilled:
    """Fill a cache with random tokens."""
    config = model.config.get_text_config(decoder=True)
    size = context + rows
    past: Any = (
        DynamicCache(config=config) if cache == "dynamic" else StaticCache(config=config, max_cache_len=size)
    )
    ids = torch.randint(int(config.vocab_size), (1, context), generator=torch.Generator().manual_seed(SEED))
    positions = torch.arange(context, device=model.device)[None]
    model(
        input_ids=ids.to(model.device),
        past_key_values=past,
        position_ids=positions,
        use_cache=True,
        logits_to_keep=1,
    )
    kwargs = {
        "past_key_values": past,
        "attention_mask": None,
        "position_ids": positions + 1,
        "use_cache": True,
    }
    return Prefilled(model, rollback_cache(past), kwargs, Text(torch.cat((ids, ids[:, :1]), dim=1)))


def _time_pass(forward: Forward, count: int, vocab_size: int) -> float:
    """Return the seconds of a pass over `count` rows; the pass is undone in the cache."""
    tree = _some_tree(count - 1, vocab_size, chain=not forward.trees)
    tokens = np.zeros(count, np.int64)
    tokens[1:] = tree.tokens
    begin = perf_counter()
    forward.run(tokens, tree, Wants()).best()
    seconds = perf_counter() - begin
    forward.keep(())
    return seconds


def _some_tree(nodes: int, vocab_size: int, *, chain: bool) -> DraftTree:
    """Return a binary tree of `nodes` nodes, or a chain."""
    places = np.arange(nodes)
    parents = places - 1 if chain else (places + 1) // 2 - 1
    return DraftTree(
        (places * 7919 % vocab_size).astype(np.int32), parents.astype(np.int16), np.zeros(nodes, np.uint8)
    )
