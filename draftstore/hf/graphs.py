"""Forward passes as CUDA graphs: static buffers, one graph for each shape of a pass, no logits on the host.

A pass over a tree of 20 nodes runs some thousand small kernels; launching them takes the CPU longer than the GPU needs
to read an 8B model's weights. A CUDA graph is launched at once. It always computes the same shapes at the same
addresses, so all inputs and outputs of a pass lie in static buffers:

    pool      keys, values of all texts and layers, see `draftstore.hf.pools`
    integers  of each text: tokens in the pool, position of row 0, ids and depths of the rows  host -> device, pinned
    bias      float32 [texts, rows, rows], which row attends to which                            host -> device, pinned
    choices   int64 [texts x rows, 1 or 9], the most likely tokens                               device -> host, pinned

A pass reads one text here and several in `draftstore.hf.batches`. Their number is padded to a power of two, the rows of
each to the next of 1, 2, 4, 8, 16, 32, 64, 96, 128. Padding attends to the past and to itself, nothing attends to it,
and its keys lie behind the last row, where the next pass overwrites them.

Attention sees 256, 512, 1024, ... columns of the pool, as many as the text needs: its cost grows with the text, not
with the size of the pool.

A graph is captured when its numbers of texts, rows and columns first occur, after a warm-up run of the same pass on a
separate stream. All graphs of a model share one memory pool and one tensor for logits: the outputs of one graph are not
used once the next one runs. CachePool and graphs stay with the model, for all texts that fit.

On a CPU the same code runs without capture, so that it can be tested without a GPU.
"""

import logging
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.cache_utils import StaticCache

from draftstore.errors import DecodingError
from draftstore.hf.caches import FixedCache
from draftstore.hf.checks import rope_settings, takes_trees
from draftstore.hf.graph_runner import GraphRunner
from draftstore.hf.pass_shapes import LEAST_WIDTH, MAX_ROWS, Entry
from draftstore.hf.passes import Rows, Wants
from draftstore.hf.pools import CachePool, fits_pool
from draftstore.hf.targets import Forward, Prefilled
from draftstore.trees.tree import DraftTree

LOG = logging.getLogger(__name__)


def graph_forward(prefilled: Prefilled) -> Forward | None:
    """Return passes as CUDA graphs if possible: model on a GPU, `sdpa`, a static cache, no obstacles.

    None: passes must run in another way. A model that is decoding another text also gets None.
    """
    if prefilled.model.device.type != "cuda":
        return None
    why = why_not(prefilled)
    if why is None:
        runner = _RUNNERS.get(prefilled.model)
        if runner is None or not runner.busy:
            return GraphForward(prefilled)
    LOG.debug("no CUDA graphs: %s", why or "the model is at work on another text")
    return None


def why_not(prefilled: Prefilled) -> str | None:
    """Return the reason why passes cannot be captured; None if they can."""
    model, cache = prefilled.model, prefilled.model_kwargs.get("past_key_values")
    config = model.config.get_text_config(decoder=True)
    if not isinstance(prefilled.memory, FixedCache) or not isinstance(cache, StaticCache):
        return f"a {type(cache).__name__} grows: use cache_implementation='static'"
    if not takes_trees(model, prefilled.memory, prefilled.model_kwargs):
        return f"{type(model).__name__} takes no trees as it is called here"
    if config._attn_implementation != "sdpa":
        return f"attention is {config._attn_implementation!r}, expected 'sdpa'"
    if not model._can_compile_fullgraph:
        return f"the forward pass of {type(model).__name__} depends on values, so it is not the same twice"
    if any(rope.get("rope_type") == "dynamic" for rope in rope_settings(config)):
        return "the rotation of positions ('dynamic' RoPE) is computed anew as the text grows"
    if getattr(model, "hf_quantizer", None) is not None and not model.hf_quantizer.is_compileable:
        return "the weights are quantized in a way that cannot be captured"
    if len({parameter.device for parameter in model.parameters()}) > 1:
        return "the model lies on several devices"
    if not fits_pool(cache):
        return "the layers of the cache are not alike"
    return None


class GraphForward:
    """The passes of one text, see `draftstore.hf.targets.Forward`: `generate(..., forward=GraphForward)`."""

    trees = True

    def __init__(self, prefilled: Prefilled) -> None:
        """Copy the prompt's keys and values into the model's pool.

        Raises:
            DecodingError: passes cannot be captured, or the model is decoding another text.
        """
        why = why_not(prefilled)
        if why is not None:
            raise DecodingError(f"no CUDA graphs here: {why}; leave out forward=GraphForward")
        kwargs = prefilled.model_kwargs
        self._cache: StaticCache = kwargs["past_key_values"]
        length = prefilled.memory.length
        columns = _seen(kwargs.get("attention_mask"), length, self._cache)
        self._prompt = self._length = len(columns)
        self._hidden = length - self._length
        self._size = int(self._cache.get_max_length()) - self._hidden
        self._shift = int(kwargs["position_ids"][0, -1]) - self._length
        self._runner = _runner_of(prefilled.model, self._cache, self._size + MAX_ROWS)
        self._runner.begin(self)
        self._runner.pool.fill(self._cache, columns)

    def room(self) -> int:
        """Return the maximum nodes of the next pass: room in the given cache, and the largest graph."""
        return min(self._size - self._length, MAX_ROWS) - 1

    def run(self, tokens: NDArray[np.int64], tree: DraftTree, wants: Wants) -> Rows:
        """Run a pass; see `Forward`."""
        (rows,) = self._runner.run([Entry(tokens, tree, self._length, self._length + self._shift)], wants)
        return rows

    def keep(self, rows: Sequence[int]) -> None:
        """Move the kept rows to the front of the pass; see `Forward`."""
        self._runner.pool.move([self._length], [rows])
        self._length += len(rows)

    def close(self) -> None:
        """Update the given cache and release the pool."""
        if self._runner.end(self):
            self._runner.pool.spill(self._cache, self._prompt, self._length, self._hidden)


def _seen(attention_mask: torch.Tensor | None, length: int, cache: Any) -> torch.Tensor:
    """Return int64 [any], the columns of a cache that are not padding."""
    device = cache.layers[0].keys.device
    if attention_mask is None:
        return torch.arange(length, device=device)
    return attention_mask[0, :length].to(device).nonzero()[:, 0]


_RUNNERS: "weakref.WeakKeyDictionary[Any, GraphRunner]" = weakref.WeakKeyDictionary()


def _runner_of(model: Any, cache: StaticCache, length: int) -> GraphRunner:
    """Return a model's runner, a new one if its pool is too small or the weights have moved."""
    mark = mark_of(model)
    runner = _RUNNERS.get(model)
    if runner is None or runner.mark != mark or not runner.pool.fits(cache, length):
        with torch.inference_mode(mode=False):  # the buffers must be writable outside of it
            layer, size = cache.layers[0], -(-length // LEAST_WIDTH) * LEAST_WIDTH
            pool = CachePool(layer, len(cache.layers), size, MAX_ROWS)
            runner = GraphRunner(model, pool, mark)
        _RUNNERS[model] = runner
    return runner


def mark_of(model: Any) -> int:
    """Return a hash of the weights' addresses and the attention implementation, which graphs depend on."""
    places = tuple(parameter.data_ptr() for parameter in model.parameters())
    return hash((places, model.config._attn_implementation, model.training))
