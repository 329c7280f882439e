"""The buffers and CUDA graphs of one model: filling in, capturing, replaying and reading passes.

See `draftstore.hf.graphs` for their purpose.
"""

import logging
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from draftstore.errors import DecodingError
from draftstore.hf.attention import shared_keys
from draftstore.hf.masks import shape_of
from draftstore.hf.pass_shapes import (
    BUCKETS,
    LEAST_WIDTH,
    MAX_ROWS,
    MAX_TOGETHER,
    TEXTS,
    Entry,
    PassShape,
    most_rows,
    padded,
)
from draftstore.hf.passes import CANDIDATES, Pass, PassPart, Wants, last_hidden, pass_of
from draftstore.hf.pools import CachePool, host_buffer
from draftstore.hf.prompts import PromptCandidates, gathering

MAX_GRAPHS = 128
"""Maximum graphs of a model; the least recently used one is dropped."""
WARM_UPS = 2
"""Warm-up passes before capture, in which libraries choose kernels and allocate memory."""

LOG = logging.getLogger(__name__)


class GraphPass(Pass):
    """A `Pass` whose tensors lie in the memory of a graph."""

    def __init__(self, rows: Pass, host: torch.Tensor | None, copied: Any) -> None:
        """Show a replayed pass.

        Args:
            rows: the graph's pass.
            host: int64 [rows, any], pinned, destination of the choices; None without a graph.
            copied: event after that copy.
        """
        self._logits, self._hidden, self._layers = rows._logits, rows._hidden, rows._layers
        self._choices, self._offset = rows._choices, rows._offset
        self._best = self._host = None
        self._pinned, self._copied = host, copied

    def _fetch(self) -> NDArray[np.int64]:
        """Wait for the copy; see `Pass`."""
        if self._host is None and self._pinned is not None:
            self._copied.synchronize()
            self._host = self._pinned.numpy().copy()
        return super()._fetch()

    def layers(self, row: int) -> tuple[torch.Tensor, ...]:
        """Return copies of the hidden states of a row, see `Pass`: the caller keeps them beyond the next pass."""
        return tuple(layer.clone() for layer in super().layers(row))


class CapturedPass(NamedTuple):
    """The graph of a pass, and its output tensors."""

    rows: Pass
    graph: Any


class GraphRunner:
    """Runs the passes of one model over static buffers: as CUDA graphs, one for every shape of a pass, or as they are.

    Attributes:
        pool: keys and values.
        mark: hash of the weights' addresses and the attention; graphs are valid only for it.
        columns: columns that the texts of the last pass saw, all together.
    """

    def __init__(self, model: Any, pool: CachePool, mark: int, *, exact: bool = False) -> None:
        """Allocate buffers.

        Args:
            model: model of transformers.
            pool: keys and values.
            mark: see the attribute.
            exact: whether passes have the texts, rows and columns that they need, instead of the next larger shape of
                which there may be a graph.
        """
        self._model = weakref.ref(model)
        self.pool, self.mark, self.columns = pool, mark, 0
        self._exact = exact
        self._owner: weakref.ref[Any] | None = None
        self._device = device = pool.keys.device
        self._captures = captures(device)
        self._captured: OrderedDict[PassShape, CapturedPass | None] = OrderedDict()
        self._logits: torch.Tensor | None = None
        self._dtype = model.dtype
        most = max(MAX_ROWS, pool.slots, MAX_TOGETHER if pool.slots > 1 else 0)
        self._integers = torch.zeros(4 * most, dtype=torch.int64, device=device)
        self._bias = torch.zeros(MAX_ROWS * most, dtype=torch.float32, device=device)
        self._host_integers = host_buffer(len(self._integers), torch.int64, device)
        self._host_bias = host_buffer(len(self._bias), torch.float32, device)
        self._host_choices = host_buffer(most * (1 + CANDIDATES), torch.int64, device)
        self._memory: Any = torch.cuda.graph_pool_handle() if self._captures else None
        self._sent, self._copied = event(device), event(device)

    @property
    def busy(self) -> bool:
        """Whether a text is being decoded."""
        return self._owner is not None and self._owner() is not None

    def begin(self, owner: object) -> None:
        """Take the runner.

        Raises:
            DecodingError: another text is being decoded.
        """
        if self.busy:
            raise DecodingError(
                "the model is decoding another text with CUDA graphs: wait for it, or leave out forward=GraphForward"
            )
        self._owner = weakref.ref(owner)

    def end(self, owner: object) -> bool:
        """Release the runner; return whether it was this owner's."""
        mine = self._owner is not None and self._owner() is owner
        if mine:
            self._owner = None
        return mine

    def forget(self) -> None:
        """Drop all graphs: the pool has been resized."""
        self._captured.clear()

    def room(self, texts: int) -> int:
        """Return the maximum rows of each text in a pass over some texts."""
        return most_rows(texts if self._exact else padded(texts, TEXTS))

    def run(self, entries: Sequence[Entry], wants: Wants) -> list[PassPart]:
        """Run a pass over texts, those of slots 0, 1, ...; return the rows of each."""
        shape = self._shape_of(entries, wants)
        self.columns = shape.texts * shape.width
        with (
            torch.inference_mode(mode=False),
            torch.no_grad(),
        ):  # tensors that are kept must be writable inside and outside of inference mode
            self._fill_in(entries, shape)
            whole = self._replay(shape) if self._captures else None
            whole = whole or GraphPass(self._compute(shape), None, None)
        return [PassPart(whole, text * shape.rows, len(each.tokens)) for text, each in enumerate(entries)]

    def _shape_of(self, entries: Sequence[Entry], wants: Wants) -> PassShape:
        """Return the shape of a pass."""
        texts, rows = len(entries), max(len(entry.tokens) for entry in entries)
        if not self._exact:
            texts, rows = padded(texts, TEXTS), padded(rows, BUCKETS)
        columns = max(entry.past for entry in entries) + rows
        width = columns if self._exact else LEAST_WIDTH
        while width < columns:
            width *= 2
        return PassShape(texts, rows, min(width, self.pool.length), wants)

    def _fill_in(self, entries: Sequence[Entry], shape: PassShape) -> None:
        """Write a pass's inputs to the buffers and send them to the device."""
        if self._sent is not None:
            self._sent.synchronize()  # the last pass may still be reading the host buffers
        texts, rows = shape.texts, shape.rows
        integers = self._host_integers.numpy()[: 2 * texts * (1 + rows)]
        integers[:] = 0
        heads, ids, depths = _parts(integers, texts, rows)
        bias = self._host_bias.numpy()[: texts * rows * rows].reshape(texts, rows, rows)
        bias[:] = -np.inf
        bias[:, range(rows), range(rows)] = 0.0
        for text, entry in enumerate(entries):
            count, structure = len(entry.tokens), shape_of(entry.tree)
            heads[:, text] = entry.past, entry.position
            ids[text, :count] = entry.tokens
            depths[text, :count] = structure.offsets
            bias[text, :count, :count] = structure.bias
        self._integers[: integers.size].copy_(self._host_integers[: integers.size], non_blocking=True)
        self._bias[: bias.size].copy_(self._host_bias[: bias.size], non_blocking=True)
        if self._sent is not None:
            self._sent.record(torch.cuda.current_stream(self._device))

    def _replay(self, shape: PassShape) -> GraphPass | None:
        """Run a pass as a graph, captured if it is the first of its shape; None if it cannot be captured."""
        if shape not in self._captured:
            self._captured[shape] = self._capture(shape)
            if len(self._captured) > MAX_GRAPHS:
                self._captured.popitem(last=False)
        self._captured.move_to_end(shape)
        captured = self._captured[shape]
        if captured is None:
            return None
        captured.graph.replay()
        return GraphPass(captured.rows, self._fetch(captured.rows._choices), self._copied)

    def _fetch(self, choices: torch.Tensor | None) -> torch.Tensor | None:
        """Queue the copy of the choices to the host; return int64 [rows, any], valid after the event."""
        if choices is None:
            return None
        host: torch.Tensor = self._host_choices[: choices.numel()].view(choices.shape)
        host.copy_(choices, non_blocking=True)
        self._copied.record(torch.cuda.current_stream(self._device))
        return host

    def _compute(self, shape: PassShape) -> Pass:
        """Run the pass from the buffers, capturable: no value is read on the host."""
        model = self._model()
        assert model is not None
        texts, rows, width, wants = shape
        heads, ids, depths = _parts(self._integers[: 2 * texts * (1 + rows)], texts, rows)
        past, first = heads[0, :, None], heads[1, :, None]
        columns = torch.arange(width, device=self._device)
        self.pool.texts, self.pool.width = slice(0, texts), width
        self.pool.places = past + columns[:rows]
        bias = torch.zeros((texts, rows, width), dtype=self._dtype, device=self._device)
        bias.masked_fill_((columns >= past)[:, None], -torch.inf)
        among = self._bias[: texts * rows * rows].view(texts, rows, rows).to(self._dtype)
        bias.scatter_(2, self.pool.places[:, None].expand_as(among), among)
        with shared_keys(), last_hidden(model, wants.hidden) as hidden:
            outputs = model(
                input_ids=ids,
                attention_mask=bias[:, None],
                position_ids=first + depths,
                past_key_values=self.pool.cache,
                use_cache=True,
                return_dict=True,
                **({"output_hidden_states": True} if wants.layers else {}),
            )
        if self._captures:
            outputs.logits = self._keep_logits(outputs.logits)
        return pass_of(outputs, rows, wants, hidden)

    def read(
        self,
        slot: int,
        tokens: NDArray[np.int64],
        past: int,
        wants: Wants,
        prompt_candidates: PromptCandidates | None = None,
    ) -> Pass:
        """Read tokens of one text at once, without a graph; return the outputs of the last one.

        Args:
            slot: slot of the text.
            tokens: int64 [any].
            past: tokens of the text before, which are its positions too.
            wants: outputs needed.
            prompt_candidates: gathers the candidates at all of them.
        """
        model: Any = self._model()
        kept = {"logits_to_keep": 0 if prompt_candidates else 1} if model._supports_logits_to_keep() else {}
        count, width = len(tokens), past + len(tokens)
        with torch.inference_mode(mode=False), torch.no_grad():
            ids = torch.from_numpy(tokens).to(self._device)[None]
            places = torch.arange(past, width, device=self._device)[None]
            self.pool.texts, self.pool.width, self.pool.places = slice(slot, slot + 1), width, places
            bias = torch.zeros((1, 1, count, width), dtype=self._dtype, device=self._device)
            bias[..., past:].masked_fill_(places[:, None] > places[..., None], -torch.inf)
            with (
                gathering(prompt_candidates, model),
                shared_keys(),
                last_hidden(model, wants.hidden) as hidden,
            ):
                outputs = model(
                    input_ids=ids,
                    attention_mask=bias,
                    position_ids=places,
                    past_key_values=self.pool.cache,
                    use_cache=True,
                    return_dict=True,
                    **kept,
                )
            return pass_of(outputs, 1, wants, hidden)

    def _keep_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Copy logits, [texts, rows, vocabulary], to the tensor shared by all graphs, to free their own memory."""
        texts, rows, size = logits.shape
        if self._logits is None:
            self._logits = logits.new_zeros(len(self._host_choices) // (1 + CANDIDATES), size)
        kept: torch.Tensor = self._logits[: texts * rows].view(logits.shape)
        return kept.copy_(logits)

    def _capture(self, shape: PassShape) -> CapturedPass | None:
        """Capture the graph of a shape; None if the model cannot be captured."""
        # This also computes the buffers' present content, which is harmless.
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self._device):
            stream: Any = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(WARM_UPS):
                    self._compute(shape)
            torch.cuda.current_stream().wait_stream(stream)
            try:
                with torch.cuda.graph(
                    graph, pool=self._memory, stream=stream, capture_error_mode="thread_local"
                ):
                    captured = self._compute(shape)
            except RuntimeError as error:
                LOG.warning(
                    "%s cannot be captured as a CUDA graph (%s): it runs without graphs, for which "
                    "cache_implementation='dynamic' is faster",
                    type(self._model()).__name__,
                    error,
                )
                return None
        LOG.debug("captured a graph of %d texts, %d rows and %d columns", *shape[:3])
        return CapturedPass(captured, graph)


def _parts(integers: Any, texts: int, rows: int) -> tuple[Any, Any, Any]:
    """Return the integers of a pass: tokens in the pool and first positions, [2, texts]; ids, depths [texts, rows]."""
    size = texts * rows
    return (
        integers[: 2 * texts].reshape(2, texts),
        integers[2 * texts : 2 * texts + size].reshape(texts, rows),
        integers[2 * texts + size :].reshape(texts, rows),
    )


def captures(device: torch.device) -> bool:
    """Return True if passes on a device are captured as graphs."""
    return device.type == "cuda"


def event(device: torch.device) -> Any:
    """Return a CUDA event; None on a CPU."""
    return torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
