"""Forward passes as CUDA graphs: static buffers, one graph for each number of rows, no logits on the host.

A pass over a tree of 20 nodes runs some thousand small kernels; to queue them takes the processor longer than an 8B
model's weights take to be read. A CUDA graph is queued at once. It always computes the same shapes at the same
addresses, so everything that a pass needs lies in buffers that are written in place:

    pool      keys, values [layers, 1, heads, length, size], of all layers: keeping the accepted rows is one gather each
    integers  tokens in the cache, position of row 0, ids and depths of the rows      host -> device, pinned
    bias      float32 [rows, rows], which row attends to which                          host -> device, pinned
    choices   int64 [rows, 1 or 9], the most likely tokens                              device -> host, pinned

The rows of a pass are filled up to the next of 1, 2, 4, 8, 16, 32, 64, 96, 128. What is filled in attends to the past
and to itself, nothing attends to it, and its keys lie behind the last row, where the next pass writes its own.

Each graph is captured when its number of rows first occurs, after the same pass has run outside of it on a stream of
its own; all graphs of a model share one pool of memory, for the outputs of one are not used once the next one runs.
Pool and graphs stay with the model, for all texts that fit.

On a processor the same code runs without capture, which is how it is tested where there is no GPU.
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
from draftstore.hf.caches import StaticMemory
from draftstore.hf.checks import takes_trees
from draftstore.hf.masks import padding_bias, shape_of
from draftstore.hf.pools import Pool, fits_pool, host_buffer
from draftstore.hf.targets import CANDIDATES, Forward, Prefilled, Rows, Wants, last_hidden, rows_of
from draftstore.tree import DraftTree

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 96, 128)
"""Rows that a pass may have."""
MOST_ROWS = BUCKETS[-1]
WARM_UPS = 2
"""Passes outside a graph before it is captured: libraries choose kernels and take memory in the first ones."""
_GRAIN = 256
"""The length of a pool is a multiple of this."""
_HEAD = 2
"""Integers in front of the ids: the tokens in the cache, and the position of row 0."""

LOG = logging.getLogger(__name__)


def graph_forward(prefilled: Prefilled) -> Forward | None:
    """Return passes as CUDA graphs where they can be had: model on a GPU, `sdpa`, a static cache, nothing in the way.

    None stands for: run them in another way. So it is too while another text of the same model is decoded.
    """
    why = why_not(prefilled)
    if why is None and prefilled.model.device.type == "cuda":
        machine = _MACHINES.get(prefilled.model)
        if machine is None or not machine.busy:
            return GraphForward(prefilled)
    LOG.debug("no CUDA graphs: %s", why or "the model is not on a GPU, or at work on another text")
    return None


def why_not(prefilled: Prefilled) -> str | None:
    """Return why passes cannot be captured; None if they can."""
    model, cache = prefilled.model, prefilled.model_kwargs.get("past_key_values")
    config = model.config.get_text_config(decoder=True)
    if not isinstance(prefilled.memory, StaticMemory) or not isinstance(cache, StaticCache):
        return f"a {type(cache).__name__} grows: use cache_implementation='static'"
    if not takes_trees(model, prefilled.memory, prefilled.model_kwargs):
        return f"{type(model).__name__} takes no trees as it is called here"
    if config._attn_implementation != "sdpa":
        return f"attention is {config._attn_implementation!r}, expected 'sdpa'"
    if not model._can_compile_fullgraph:
        return f"the forward pass of {type(model).__name__} depends on values, so it is not the same twice"
    if _rope_types(config) & {"dynamic"}:
        return "the rotation of positions ('dynamic' RoPE) is computed anew as the text grows"
    if getattr(model, "hf_quantizer", None) is not None and not model.hf_quantizer.is_compileable:
        return "the weights are quantized in a way that cannot be captured"
    if len({parameter.device for parameter in model.parameters()}) > 1:
        return "the model lies on several devices"
    if not fits_pool(cache):
        return "the layers of the cache are not alike"
    return None


def _rope_types(config: Any) -> set[str]:
    """Return the ways in which a model turns positions into rotations."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [value for value in rope.values() if isinstance(value, dict)] or [rope]
    return {str(kind.get("rope_type", "default")) for kind in kinds}


class GraphForward:
    """The passes of one text, see `draftstore.hf.targets.Forward`: `generate(..., forward=GraphForward)`."""

    trees = True

    def __init__(self, prefilled: Prefilled) -> None:
        """Take the prompt's keys and values into the model's pool.

        Raises:
            DecodingError: passes cannot be captured, or the model is at work on another text.
        """
        why = why_not(prefilled)
        if why is not None:
            raise DecodingError(f"no CUDA graphs here: {why}; leave out forward=GraphForward")
        kwargs = prefilled.model_kwargs
        self._cache: StaticCache = kwargs["past_key_values"]
        self._prompt = self._length = prefilled.memory.length
        self._size = int(self._cache.get_max_length())
        self._shift = int(kwargs["position_ids"][0, -1]) - self._length
        self._machine = _machine_of(prefilled.model, self._cache, self._size + MOST_ROWS)
        self._machine.begin(self, self._cache, self._length, kwargs.get("attention_mask"))

    def room(self) -> int:
        """Return the nodes that the next pass may have: what the given cache could take, and the largest graph."""
        return min(self._size - self._length, MOST_ROWS) - 1

    def run(self, tokens: NDArray[np.int64], tree: DraftTree, wants: Wants) -> "GraphRows":
        """Run a pass; see `Forward`."""
        return self._machine.run(tokens, tree, wants, self._length, self._shift)

    def keep(self, rows: Sequence[int]) -> None:
        """Move the rows that stay to the front of the pass; see `Forward`."""
        self._machine.pool.move(self._length, rows)
        self._length += len(rows)

    def close(self) -> None:
        """Bring the given cache up to date, and let go of the pool."""
        if self._machine.end(self):
            self._machine.pool.spill(self._cache, self._prompt, self._length)


class GraphRows(Rows):
    """A `Pass` whose tensors lie in the memory of a graph."""

    def __init__(self, rows: Rows, count: int, host: torch.Tensor | None, copied: Any) -> None:
        """Show the first rows of a padded pass.

        Args:
            rows: of the graph.
            count: of them that mean something.
            host: int64 [at least count, any], pinned, into which the choices are being copied; None on a processor.
            copied: the event of that.
        """
        self._logits, self._hidden, self._layers = rows._logits, rows._hidden, rows._layers
        self._choices, self._offset = rows._choices, rows._offset
        self._best = self._host = None
        self._count, self._pinned, self._copied = count, host, copied

    def _fetch(self) -> NDArray[np.int64]:
        """Wait for the copy; see `Rows`."""
        if self._host is None:
            assert self._choices is not None, "asked for what was not wanted"
            if self._pinned is None:
                self._host = self._choices[: self._count].numpy()
            else:
                self._copied.synchronize()
                self._host = self._pinned[: self._count].numpy().copy()
        return self._host

    def layers(self, row: int) -> tuple[torch.Tensor, ...]:
        """Return copies of the hidden states of a row; see `Pass`. They are collected, and the next pass comes."""
        return tuple(layer.clone() for layer in super().layers(row))


class _Captured:
    """A pass over a bucket of rows: a graph, and the tensors that it writes. On a processor there is no graph."""

    def __init__(self, rows: Rows | None = None, graph: Any = None) -> None:
        self.rows, self.graph = rows, graph


class _Machine:
    """The buffers and graphs of one model.

    Attributes:
        pool: keys and values.
        mark: of the weights and of how the model is run; with others the graphs mean nothing.
    """

    def __init__(self, model: Any, pool: Pool, mark: int) -> None:
        self._model = weakref.ref(model)
        self.pool, self.mark = pool, mark
        self._owner: weakref.ref[GraphForward] | None = None
        self._device = device = pool.keys.device
        self._captures = _captures(device)
        self._captured: dict[tuple[int, Wants], _Captured] = {}
        self._dtype = model.dtype
        self._columns = torch.arange(pool.length, device=device)
        self._seen = torch.zeros(pool.length, dtype=self._dtype, device=device)
        self._integers = torch.zeros(_HEAD + 2 * MOST_ROWS, dtype=torch.int64, device=device)
        self._bias = torch.zeros(MOST_ROWS * MOST_ROWS, dtype=torch.float32, device=device)
        self._host_integers = host_buffer(len(self._integers), torch.int64, device)
        self._host_bias = host_buffer(len(self._bias), torch.float32, device)
        self._host_choices = host_buffer(MOST_ROWS * (1 + CANDIDATES), torch.int64, device)
        self._memory: Any = torch.cuda.graph_pool_handle() if self._captures else None
        self._sent, self._copied = _event(device), _event(device)

    @property
    def busy(self) -> bool:
        """Whether a text is being decoded."""
        return self._owner is not None and self._owner() is not None

    def begin(
        self, owner: GraphForward, cache: StaticCache, length: int, attention_mask: torch.Tensor | None
    ) -> None:
        """Start a text.

        Raises:
            DecodingError: another one is not done.
        """
        if self.busy:
            raise DecodingError(
                "the model is decoding another text with CUDA graphs: wait for it, or leave out forward=GraphForward"
            )
        self._owner = weakref.ref(owner)
        self.pool.fill(cache, length)
        padding = padding_bias(attention_mask, length, self._seen)
        self._seen.zero_()
        if padding is not None:
            self._seen[:length] = padding

    def end(self, owner: GraphForward) -> bool:
        """End a text; return whether it was this one that was being decoded."""
        mine = self._owner is not None and self._owner() is owner
        if mine:
            self._owner = None
        return mine

    @torch.no_grad()
    def run(
        self, tokens: NDArray[np.int64], tree: DraftTree, wants: Wants, past: int, shift: int
    ) -> GraphRows:
        """Run a pass over some rows behind `past` tokens; positions are places in the cache plus `shift`."""
        count = len(tokens)
        rows = next(bucket for bucket in BUCKETS if bucket >= count)
        self._fill_in(tokens, tree, rows, past, shift)
        captured = self._captured.get((rows, wants))
        if captured is None:
            captured = self._captured[rows, wants] = self._capture(rows, wants)
        if not self._captures:
            return GraphRows(self._compute(rows, wants), count, None, None)
        captured.graph.replay()
        assert captured.rows is not None
        return GraphRows(captured.rows, count, self._fetch(captured.rows._choices, count), self._copied)

    def _fill_in(self, tokens: NDArray[np.int64], tree: DraftTree, rows: int, past: int, shift: int) -> None:
        """Write what the pass computes from, and send it to the device."""
        if self._sent is not None:
            self._sent.synchronize()  # the last pass may still be reading the buffers of the host
        count, shape = len(tokens), shape_of(tree)
        integers = self._host_integers.numpy()[: _HEAD + 2 * rows]
        integers[:] = 0
        integers[:_HEAD] = past, past + shift
        integers[_HEAD : _HEAD + count] = tokens
        integers[_HEAD + rows : _HEAD + rows + count] = shape.offsets
        bias = self._host_bias.numpy()[: rows * rows].reshape(rows, rows)
        bias[:] = -np.inf
        np.fill_diagonal(bias, 0.0)
        bias[:count, :count] = shape.bias
        self._integers[: len(integers)].copy_(self._host_integers[: len(integers)], non_blocking=True)
        self._bias[: bias.size].copy_(self._host_bias[: bias.size], non_blocking=True)
        if self._sent is not None:
            self._sent.record(torch.cuda.current_stream(self._device))

    def _fetch(self, choices: torch.Tensor | None, count: int) -> torch.Tensor | None:
        """Queue the copy of the choices to the host; return int64 [count, any], which hold once the event has come."""
        if choices is None:
            return None
        host: torch.Tensor = self._host_choices[: choices[:count].numel()].view(count, choices.shape[1])
        host.copy_(choices[:count], non_blocking=True)
        self._copied.record(torch.cuda.current_stream(self._device))
        return host

    def _compute(self, rows: int, wants: Wants) -> Rows:
        """Run the pass from the buffers alone, so that it can be captured: no value is looked at on the way."""
        model = self._model()
        assert model is not None
        past, first = self._integers[0:1], self._integers[1:2]
        ids = self._integers[_HEAD : _HEAD + rows]
        depths = self._integers[_HEAD + rows : _HEAD + 2 * rows]
        self.pool.places = past + self._columns[:rows]
        unseen = torch.full_like(self._seen, -torch.inf)
        bias = torch.where(self._columns < past, self._seen, unseen).repeat(rows, 1)
        bias.index_copy_(1, self.pool.places, self._bias[: rows * rows].view(rows, rows).to(self._dtype))
        with last_hidden(model, wants.hidden) as hidden:
            outputs = model(
                input_ids=ids[None],
                attention_mask=bias[None, None],
                position_ids=(first + depths)[None],
                past_key_values=self.pool.cache,
                use_cache=True,
                return_dict=True,
                **({"output_hidden_states": True} if wants.layers else {}),
            )
        return rows_of(outputs, rows, wants, hidden)

    def _capture(self, rows: int, wants: Wants) -> _Captured:
        """Capture the graph of a number of rows; what is in the buffers is computed, and does no harm.

        Raises:
            DecodingError: something in the model cannot be captured.
        """
        if not self._captures:
            return _Captured()
        stream: Any = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self._device):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(WARM_UPS):
                    self._compute(rows, wants)
            torch.cuda.current_stream().wait_stream(stream)
            try:
                with torch.cuda.graph(
                    graph, pool=self._memory, stream=stream, capture_error_mode="thread_local"
                ):
                    captured = self._compute(rows, wants)
            except RuntimeError as error:
                raise DecodingError(
                    f"{type(self._model()).__name__} cannot be captured as a CUDA graph ({error}): "
                    "use cache_implementation='dynamic'"
                ) from error
        LOG.debug("captured a graph of %d rows", rows)
        return _Captured(captured, graph)


_MACHINES: "weakref.WeakKeyDictionary[Any, _Machine]" = weakref.WeakKeyDictionary()


def _machine_of(model: Any, cache: StaticCache, length: int) -> _Machine:
    """Return the machine of a model, a new one if its pool is too small or the weights have moved."""
    mark = _mark_of(model)
    machine = _MACHINES.get(model)
    if machine is None or machine.mark != mark or not machine.pool.fits(cache, length):
        with torch.inference_mode(mode=False):  # or the buffers could not be written outside of it
            layer, size = cache.layers[0], -(-length // _GRAIN) * _GRAIN
            pool = Pool(layer, len(cache.layers), size, MOST_ROWS)
            machine = _Machine(model, pool, mark)
        _MACHINES[model] = machine
    return machine


def _mark_of(model: Any) -> int:
    """Return a hash of where the weights lie and of how attention is computed: what a graph has taken for granted."""
    places = tuple(parameter.data_ptr() for parameter in model.parameters())
    return hash((places, model.config._attn_implementation, model.training))


def _captures(device: torch.device) -> bool:
    """Tell whether passes on a device are captured as graphs."""
    return device.type == "cuda"


def _event(device: torch.device) -> Any:
    """Return a mark in the work that a GPU has queued; None on a processor."""
    return torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
