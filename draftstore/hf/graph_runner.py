"""The buffers and CUDA graphs of one model: filling in, capturing, replaying and reading passes.

See `draftstore.hf.graphs` for their purpose.
"""

import logging
import weakref
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.cache_utils import StaticCache

from draftstore.errors import DecodingError
from draftstore.hf.masks import padding_bias, shape_of
from draftstore.hf.passes import CANDIDATES, Pass, Wants, last_hidden, pass_of
from draftstore.hf.pools import CachePool, host_buffer
from draftstore.trees.tree import DraftTree

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 96, 128)
"""Possible numbers of rows in a pass."""
MOST_ROWS = BUCKETS[-1]
WARM_UPS = 2
"""Warm-up passes before capture, in which libraries choose kernels and allocate memory."""
LEAST_WIDTH = 256
"""Minimum columns of attention; the number doubles as the text grows, up to the length of the pool."""
_HEAD = 2
"""Integers before the ids: the number of tokens in the cache, and the position of row 0."""

LOG = logging.getLogger(__name__)


class GraphPass(Pass):
    """A `Pass` whose tensors lie in the memory of a graph."""

    def __init__(self, rows: Pass, count: int, host: torch.Tensor | None, copied: Any) -> None:
        """Show the valid rows of a padded pass.

        Args:
            rows: the graph's pass.
            count: number of valid rows.
            host: int64 [at least count, any], pinned, destination of the choices; None without a graph.
            copied: event after that copy.
        """
        self._logits, self._hidden, self._layers = rows._logits, rows._hidden, rows._layers
        self._choices, self._offset = rows._choices, rows._offset
        self._best = self._host = None
        self._count, self._pinned, self._copied = count, host, copied

    def _fetch(self) -> NDArray[np.int64]:
        """Wait for the copy; see `Pass`."""
        if self._host is None:
            assert self._choices is not None, "asked for what was not wanted"
            if self._pinned is None:
                self._host = self._choices[: self._count].cpu().numpy()
            else:
                self._copied.synchronize()
                self._host = self._pinned[: self._count].numpy().copy()
        return self._host

    def layers(self, row: int) -> tuple[torch.Tensor, ...]:
        """Return copies of the hidden states of a row, see `Pass`: the caller keeps them beyond the next pass."""
        return tuple(layer.clone() for layer in super().layers(row))


class CapturedPass(NamedTuple):
    """The graph of a pass, and its output tensors."""

    rows: Pass
    graph: Any


class GraphRunner:
    """Runs the passes of one model as CUDA graphs: its buffers, and one graph for every shape of a pass.

    Attributes:
        pool: keys and values.
        mark: hash of the weights' addresses and the attention; graphs are valid only for it.
    """

    def __init__(self, model: Any, pool: CachePool, mark: int) -> None:
        self._model = weakref.ref(model)
        self.pool, self.mark = pool, mark
        self._owner: weakref.ref[Any] | None = None
        self._device = device = pool.keys.device
        self._captures = captures(device)
        self._captured: dict[tuple[int, int, Wants], CapturedPass | None] = {}
        self._logits: torch.Tensor | None = None
        self._dtype = model.dtype
        self._columns = torch.arange(pool.length, device=device)
        self._seen = torch.zeros(pool.length, dtype=self._dtype, device=device)
        self._integers = torch.zeros(_HEAD + 2 * MOST_ROWS, dtype=torch.int64, device=device)
        self._bias = torch.zeros(MOST_ROWS * MOST_ROWS, dtype=torch.float32, device=device)
        self._host_integers = host_buffer(len(self._integers), torch.int64, device)
        self._host_bias = host_buffer(len(self._bias), torch.float32, device)
        self._host_choices = host_buffer(MOST_ROWS * (1 + CANDIDATES), torch.int64, device)
        self._memory: Any = torch.cuda.graph_pool_handle() if self._captures else None
        self._sent, self._copied = event(device), event(device)

    @property
    def busy(self) -> bool:
        """Whether a text is being decoded."""
        return self._owner is not None and self._owner() is not None

    def begin(
        self, owner: object, cache: StaticCache, length: int, attention_mask: torch.Tensor | None
    ) -> None:
        """Start a text.

        Raises:
            DecodingError: another text is being decoded.
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

    def end(self, owner: object) -> bool:
        """End a text; return whether it was the one being decoded."""
        mine = self._owner is not None and self._owner() is owner
        if mine:
            self._owner = None
        return mine

    def run(
        self, tokens: NDArray[np.int64], tree: DraftTree, wants: Wants, past: int, shift: int
    ) -> GraphPass:
        """Run a pass over rows after `past` tokens; positions are cache positions plus `shift`."""
        count = len(tokens)
        rows = next(bucket for bucket in BUCKETS if bucket >= count)
        shape = (rows, self._width(past + rows), wants)
        with (
            torch.inference_mode(mode=False),
            torch.no_grad(),
        ):  # tensors that are kept must be writable inside and outside of inference mode
            self._fill_in(tokens, tree, rows, past, shift)
            if self._captures and shape not in self._captured:
                self._captured[shape] = self._capture(*shape)
            captured = self._captured.get(shape)
            if captured is None:
                return GraphPass(self._compute(*shape), count, None, None)
            captured.graph.replay()
            return GraphPass(captured.rows, count, self._fetch(captured.rows._choices, count), self._copied)

    def _width(self, columns: int) -> int:
        """Return the columns of a pass that needs at least `columns`."""
        width = LEAST_WIDTH
        while width < columns:
            width *= 2
        return min(width, self.pool.length)

    def _fill_in(self, tokens: NDArray[np.int64], tree: DraftTree, rows: int, past: int, shift: int) -> None:
        """Write a pass's inputs to the buffers and send them to the device."""
        if self._sent is not None:
            self._sent.synchronize()  # the last pass may still be reading the host buffers
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
        """Queue the copy of the choices to the host; return int64 [count, any], valid after the event."""
        if choices is None:
            return None
        host: torch.Tensor = self._host_choices[: choices[:count].numel()].view(count, choices.shape[1])
        host.copy_(choices[:count], non_blocking=True)
        self._copied.record(torch.cuda.current_stream(self._device))
        return host

    def _compute(self, rows: int, width: int, wants: Wants) -> Pass:
        """Run the pass from the buffers, capturable: no value is read on the host."""
        model = self._model()
        assert model is not None
        past, first = self._integers[0:1], self._integers[1:2]
        ids = self._integers[_HEAD : _HEAD + rows]
        depths = self._integers[_HEAD + rows : _HEAD + 2 * rows]
        self.pool.places, self.pool.width = past + self._columns[:rows], width
        seen = self._seen[:width]
        bias = torch.where(self._columns[:width] < past, seen, torch.full_like(seen, -torch.inf)).repeat(
            rows, 1
        )
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
        if self._captures:
            outputs.logits = self._keep_logits(outputs.logits)
        return pass_of(outputs, rows, wants, hidden)

    def _keep_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Copy logits, [1, rows, vocabulary], to the tensor shared by all graphs, to free their own memory."""
        if self._logits is None:
            self._logits = logits.new_zeros(MOST_ROWS, logits.shape[-1])
        return self._logits[: logits.shape[1]].copy_(logits[0])[None]

    def _capture(self, rows: int, width: int, wants: Wants) -> CapturedPass | None:
        """Capture the graph for a number of rows and columns; None if the model cannot be captured.

        This also computes the buffers' present content, which is harmless.
        """
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self._device):
            stream: Any = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(WARM_UPS):
                    self._compute(rows, width, wants)
            torch.cuda.current_stream().wait_stream(stream)
            try:
                with torch.cuda.graph(
                    graph, pool=self._memory, stream=stream, capture_error_mode="thread_local"
                ):
                    captured = self._compute(rows, width, wants)
            except RuntimeError as error:
                LOG.warning(
                    "%s cannot be captured as a CUDA graph (%s): it runs without graphs, for which "
                    "cache_implementation='dynamic' is faster",
                    type(self._model()).__name__,
                    error,
                )
                return None
        LOG.debug("captured a graph of %d rows and %d columns", rows, width)
        return CapturedPass(captured, graph)


def captures(device: torch.device) -> bool:
    """Tell whether passes on a device are captured as graphs."""
    return device.type == "cuda"


def event(device: torch.device) -> Any:
    """Return a CUDA event; None on a CPU."""
    return torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
