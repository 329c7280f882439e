"""Forward passes of one model over the texts of a pool, as CUDA graphs on a GPU.

A pass over a tree of 20 nodes runs about a thousand small kernels; launching them takes the CPU longer than the GPU
needs to read an 8B model's weights. A CUDA graph is launched in one call. It always computes the same shapes at the
same addresses, so all inputs and outputs of a pass lie in static buffers:

    pool      keys, values of all texts and layers, see `draftstore.hf.pools`
    integers  of each text: tokens in the pool, and ids and depths of the rows    host -> device, pinned
    among     bool [texts, rows, rows], which row attends to which                host -> device, pinned
    choices   int64 [texts x rows, 1 or 9], the most likely tokens                device -> host, pinned

For graphs, the number of texts is padded to a power of two, the rows of each to the next of `BUCKETS`, and the columns
of the pool that attention sees to 256, 512, 1024, ... Padding attends to the past and to itself, nothing attends to it,
and its keys lie after the last row, where the next pass overwrites them. Graphs always compute the 8 most likely
tokens, since every further kind of pass would be captured while texts wait. Without graphs, a pass has just the texts,
rows, columns and outputs that it needs.

A graph is captured when its shape first occurs, after warm-up runs of the same pass on a separate stream. All graphs of
a model share one memory pool and one tensor for logits: the outputs of a graph are invalid once the next one runs.
"""

import logging
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache

from draftstore.hf.attention import Views, attention_masks, causal_masks, shared_keys, views_of
from draftstore.hf.passes import CANDIDATES, BatchRows, Fetch, Pass, Rows, Wants, gathering, last_hidden
from draftstore.hf.pools import CachePool, host_buffer
from draftstore.jit import as_input
from draftstore.recycling.prompts import PromptCandidates
from draftstore.trees.batch import DraftBatch, fill_pass
from draftstore.trees.tree import DraftTree

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 96, 128)
"""Possible numbers of rows of each text in a graph."""
TEXTS = (1, 2, 4, 8, 16, 32, 64)
"""Possible numbers of texts in a graph."""
MAX_ROWS = BUCKETS[-1]
MAX_TOGETHER = 512
"""Maximum rows of a pass over several texts: more cost as much as separate passes."""
LEAST_WIDTH = 256
"""Minimum columns of attention in a graph; doubled as the text grows, up to the length of the pool."""
MAX_GRAPHS = 128
"""Maximum graphs of a model; the least recently used one is dropped."""
WARM_UPS = 2
"""Warm-up passes before capture, in which libraries choose kernels and allocate memory."""

LOG = logging.getLogger(__name__)


class Drafted(NamedTuple):
    """The texts of a pass.

    Attributes:
        lasts: int64 [texts], the last token of each, which is row 0.
        drafts: their drafts.
        pasts: int64 [texts], tokens of each in the pool, which is the position of row 0.
    """

    lasts: NDArray[np.int64]
    drafts: DraftBatch
    pasts: NDArray[np.int64]

    @classmethod
    def of(cls, texts: Sequence[tuple[int, DraftTree, int]]) -> "Drafted":
        """Return texts given as last token, draft, and tokens in the pool."""
        lasts, trees, pasts = zip(*texts, strict=True)
        return cls(np.array(lasts, np.int64), DraftBatch.of_trees(trees), np.array(pasts, np.int64))


_Buffers = tuple[tuple[NDArray[Any], ...], tuple[tuple[torch.Tensor, torch.Tensor], ...]]
"""Arrays to fill for a pass, see `fill_pass`; copies to the device: target and source."""


class PassShape(NamedTuple):
    """The key of a graph: numbers of texts, of rows of each, and of columns that they see; outputs needed."""

    texts: int
    rows: int
    width: int
    wants: Wants


class Runner:
    """Runs the passes of one model over the texts in its pool.

    With `graphs`, passes are padded and captured: see `takes_graphs`.
    """

    def __init__(self, model: Any, pool: CachePool, views: Views, *, graphs: bool) -> None:
        self._model = weakref.ref(model)
        self.pool, self.graphs = pool, graphs
        self._views = views
        self._device = device = model.device
        self._dtype = model.dtype
        self._captured: OrderedDict[PassShape, tuple[Any, Pass] | None] = OrderedDict()
        self._logits: torch.Tensor | None = None
        most = max(MAX_ROWS, pool.slots, MAX_TOGETHER if pool.slots > 1 else 0)
        self._integers = torch.zeros(3 * most, dtype=torch.int64, device=device)
        self._among = torch.zeros(MAX_ROWS * most, dtype=torch.bool, device=device)
        self._host_integers = host_buffer(len(self._integers), torch.int64, device)
        self._host_among = host_buffer(len(self._among), torch.bool, device)
        self._host_choices = host_buffer(most * (1 + CANDIDATES), torch.int64, device)
        self._buffers: dict[tuple[int, int], _Buffers] = {}
        self._capturing = graphs and device.type == "cuda"
        self._memory: Any = torch.cuda.graph_pool_handle() if self._capturing else None
        self._stream: Any = torch.cuda.Stream(device) if self._capturing else None  # type: ignore[no-untyped-call]
        self._sent, self._copied = _event(device), _event(device)

    def forget(self) -> None:
        """Drop all graphs, after the pool was resized."""
        self._captured.clear()

    def room(self, texts: int) -> int:
        """Return the maximum rows of each text in a pass over some texts."""
        most = min(MAX_ROWS, max(1, MAX_TOGETHER // (padded(texts, TEXTS) if self.graphs else texts)))
        return max(size for size in BUCKETS if size <= most)

    def run(self, drafted: Drafted, wants: Wants) -> BatchRows:
        """Run a pass over the texts in slots 0, 1, ...; return the outputs of all."""
        shape = self._shape_of(drafted, wants)
        # Tensors that are kept must be writable inside and outside of inference mode.
        with torch.inference_mode(mode=False), torch.no_grad():
            self._fill_in(drafted, shape)
            replayed = self._replay(shape) if self._capturing else None
            start = None if self.graphs or len(drafted.lasts) > 1 else int(drafted.pasts[0])
            whole = replayed or self._compute(shape, start)
            fetch = whole.fetch if replayed is None else self._copy(replayed)
        return BatchRows(whole, fetch, shape.rows, drafted.drafts.sizes)

    def read(
        self,
        slot: int,
        prompts: Sequence[NDArray[np.int64]],
        past: int,
        wants: Wants,
        prompt_candidates: PromptCandidates | None = None,
    ) -> list[Rows]:
        """Read tokens of texts in slots from `slot` on in one pass, without a graph; return the last outputs of each.

        Shorter ones have spare rows before them, whose keys lie after the text: the last row of each is its last token.
        A single text needs no mask in layers that see all of it: see `draftstore.hf.attention.CausalMask`.

        Args:
            prompts: int64 [any] each, the next tokens of the texts.
            past: tokens that each slot holds already; 0 for several texts.
            prompt_candidates: gathers the candidates at all tokens of a single text.
        """
        model = self._model()
        assert model is not None
        keeps = {"logits_to_keep": 0 if prompt_candidates else 1} if model._supports_logits_to_keep() else {}
        texts, rows = len(prompts), max(map(len, prompts))
        spare = np.array([[rows - len(tokens)] for tokens in prompts])
        ids = np.stack([np.pad(tokens, (rows - len(tokens), 0)) for tokens in prompts])
        numbers = np.arange(rows) - spare  # of the tokens in their prompts; below 0 for spare rows
        inputs = ids, spare, np.maximum(numbers, 0), past + numbers % rows
        with torch.inference_mode(mode=False), torch.no_grad(), gathering(prompt_candidates, model):
            sent, first, depths, places = (torch.from_numpy(each).to(self._device) for each in inputs)
            width = past + rows
            masks = causal_masks(self._views, rows, width, self._dtype, self._device) if texts == 1 else None
            if masks is None:
                order = torch.arange(rows, device=self._device)
                among = (order <= order[:, None]) & (order >= first[:, None]) | (order == order[:, None])
                before = torch.full((texts, 1), past, device=self._device)
                masks = attention_masks(self._views, before, places, depths, among, width, self._dtype)
            slots, start = slice(slot, slot + texts), past if texts == 1 else places
            whole = self._forward(slots, sent, past + depths, start, masks, width, wants, 1, **keeps)
        fetch = cache(whole.fetch)
        return [Rows(whole, fetch, slice(text, text + 1)) for text in range(texts)]

    def _shape_of(self, drafted: Drafted, wants: Wants) -> PassShape:
        texts, rows = len(drafted.lasts), 1 + int(drafted.drafts.sizes.max())
        if self.graphs:
            texts, rows = padded(texts, TEXTS), padded(rows, BUCKETS)
        columns = int(drafted.pasts.max()) + rows
        width = LEAST_WIDTH if self.graphs else columns
        while width < columns:
            width *= 2
        outputs = Wants(best=True, candidates=True, hidden=wants.hidden) if self.graphs else wants
        return PassShape(texts, rows, min(width, self.pool.length), outputs)

    def _fill_in(self, drafted: Drafted, shape: PassShape) -> None:
        if self._sent is not None:
            self._sent.synchronize()  # the last pass may still be reading the host buffers
        if shape[:2] not in self._buffers:
            self._buffers[shape[:2]] = self._buffers_of(shape.texts, shape.rows)
        arrays, copies = self._buffers[shape[:2]]
        tokens, parents, _, sizes = drafted.drafts.inputs()
        places = as_input(drafted.lasts, np.int64), as_input(drafted.pasts, np.int64)
        fill_pass(*arrays, *places, tokens, parents, sizes)
        for target, source in copies:
            target.copy_(source, non_blocking=True)
        if self._sent is not None:
            self._sent.record(torch.cuda.current_stream(self._device))

    def _buffers_of(self, texts: int, rows: int) -> "_Buffers":
        """Return the parts of the buffers that a pass over so many texts and rows uses."""
        used = texts * (1 + 2 * rows), texts * rows * rows
        integers, among = self._host_integers[: used[0]], self._host_among[: used[1]]
        arrays = *_parts(integers.numpy(), texts, rows), among.numpy().reshape(texts, rows, rows)
        return arrays, ((self._integers[: used[0]], integers), (self._among[: used[1]], among))

    def _compute(self, shape: PassShape, start: torch.Tensor | int | None = None) -> Pass:
        """Run the pass from the buffers; capturable, since the host reads no values."""
        texts, rows, width, wants = shape
        pasts, ids, depths = _parts(self._integers[: texts * (1 + 2 * rows)], texts, rows)
        among = self._among[: texts * rows * rows].view(texts, rows, rows)
        past = pasts[:, None]
        places = past + torch.arange(rows, device=self._device)
        masks = attention_masks(self._views, past, places, depths, among, width, self._dtype)
        start = places if start is None else start
        return self._forward(slice(0, texts), ids, past + depths, start, masks, width, wants, rows)

    def _forward(
        self,
        slots: slice,
        ids: torch.Tensor,
        positions: torch.Tensor,
        places: torch.Tensor | int,
        masks: Any,
        width: int,
        wants: Wants,
        rows: int,
        **keeps: int,
    ) -> Pass:
        """Run a pass over the texts of some slots; ids and positions are int64 [texts, rows]."""
        model = self._model()
        assert model is not None
        self.pool.texts, self.pool.places, self.pool.width = slots, places, width
        with shared_keys(), last_hidden(model, wants.hidden) as hidden:
            outputs = model(
                input_ids=ids,
                attention_mask=masks,
                position_ids=positions,
                past_key_values=self.pool.cache,
                use_cache=True,
                return_dict=True,
                **keeps,
            )
        if self._capturing and rows == ids.shape[1]:
            outputs.logits = self._shared_logits(outputs.logits)
        return Pass(outputs, rows, wants, hidden)

    def _shared_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Copy logits, [texts, rows, vocabulary], to the tensor shared by all graphs, to free their own memory."""
        texts, rows, size = logits.shape
        if self._logits is None:
            self._logits = logits.new_zeros(len(self._host_choices) // (1 + CANDIDATES), size)
        shared: torch.Tensor = self._logits[: texts * rows].view(logits.shape)
        return shared.copy_(logits)

    def _replay(self, shape: PassShape) -> Pass | None:
        """Run a pass as a graph, captured on first use of its shape; None if it cannot be captured."""
        if shape not in self._captured:
            self._captured[shape] = self._capture(shape)
            if len(self._captured) > MAX_GRAPHS:
                self._captured.popitem(last=False)
        self._captured.move_to_end(shape)
        captured = self._captured[shape]
        if captured is None:
            return None
        captured[0].replay()
        return captured[1]

    def _copy(self, replayed: Pass) -> Fetch:
        """Queue the copy of a graph's choices to the host; return a function that waits for it."""
        assert replayed.choices is not None
        host = self._host_choices[: replayed.choices.numel()].view(replayed.choices.shape)
        host.copy_(replayed.choices, non_blocking=True)
        self._copied.record(torch.cuda.current_stream(self._device))

        def fetch() -> NDArray[np.int64]:
            self._copied.synchronize()
            return host.numpy().copy()

        return fetch

    def _capture(self, shape: PassShape) -> tuple[Any, Pass] | None:
        """Capture the graph of a shape, and its outputs; None if the model cannot be captured."""
        # This also runs the pass on the current content of the buffers, which is harmless.
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self._device):
            usual = torch.cuda.current_stream()
            self._stream.wait_stream(usual)
            with torch.cuda.stream(self._stream):
                for _ in range(WARM_UPS):
                    self._compute(shape)
            usual.wait_stream(self._stream)
            try:
                with torch.cuda.graph(
                    graph, pool=self._memory, stream=self._stream, capture_error_mode="thread_local"
                ):
                    outputs = self._compute(shape)
            except RuntimeError as error:
                torch.cuda.set_stream(usual)  # a failed capture leaves its own stream
                name = type(self._model()).__name__
                LOG.warning("%s cannot be captured as a CUDA graph (%s): it runs without one", name, error)
                return None
        return graph, outputs


def _parts(integers: Any, texts: int, rows: int) -> tuple[Any, Any, Any]:
    """Return the integers of a pass: tokens in the pool, [texts]; ids and depths, [texts, rows]."""
    ids, depths = integers[texts:].reshape(2, texts, rows)
    return integers[:texts], ids, depths


def padded(count: int, sizes: Sequence[int]) -> int:
    """Return the smallest of ascending sizes that is not below a count; beyond the last, the count itself."""
    return next((size for size in sizes if size >= count), count)


_IDLE: "weakref.WeakKeyDictionary[Any, tuple[int, Runner]]" = weakref.WeakKeyDictionary()
"""Returned runners whose graphs are worth keeping, each with the mark of its model; see `state_hash`."""


def take_runner(model: Any, most: int) -> Runner:
    """Return a runner for `most` texts: one that was returned, or one with an empty pool."""
    mark, idle = _IDLE.pop(model, (0, None))
    slots = 1 if most == 1 else 1 + (padded(most, TEXTS) if takes_graphs(model) else most)
    # A runner for more texts would divide the tokens among all of these.
    if idle is not None and mark == state_hash(model) and idle.pool.slots == slots:
        return idle
    del idle
    return new_runner(model, slots)


def return_runner(model: Any, runner: Runner) -> None:
    """Keep memory and graphs for the next caller of `take_runner` with this model."""
    if runner.graphs:
        _IDLE[model] = state_hash(model), runner


def new_runner(model: Any, slots: int) -> Runner:
    """Return a runner with an empty pool for up to `slots` texts."""
    with (
        torch.inference_mode(mode=False),
        torch.no_grad(),
    ):  # the buffers must be writable outside inference mode
        pool = CachePool(_filled(model), slots, MAX_ROWS)
        views = views_of(model.config.get_text_config(decoder=True))
        return Runner(model, pool, views, graphs=takes_graphs(model))


_FILLED: "weakref.WeakKeyDictionary[Any, tuple[Any, DynamicCache]]" = weakref.WeakKeyDictionary()


def _filled(model: Any) -> DynamicCache:
    """Return a cache of one token, which shows the shapes of the model's layers; computed once."""
    mark = state_hash(model), torch.is_autocast_enabled(model.device.type)
    if _FILLED.get(model, (None,))[0] != mark:
        filled = DynamicCache(config=model.config)
        model(input_ids=torch.zeros((1, 1), dtype=torch.int64, device=model.device), past_key_values=filled)
        _FILLED[model] = mark, filled
    return _FILLED[model][1]


def state_hash(model: Any) -> int:
    """Return a hash of all that graphs and shapes depend on: the weights' addresses and type, attention and mode."""
    places = tuple(parameter.data_ptr() for parameter in model.parameters())
    return hash((places, model.dtype, model.config._attn_implementation, model.training))


def takes_graphs(model: Any) -> bool:
    """Return True if the passes of a model are captured as CUDA graphs: on a single GPU, with static control flow."""
    quantizer = getattr(model, "hf_quantizer", None)
    return (
        model.device.type == "cuda"
        and bool(model._can_compile_fullgraph)
        and (quantizer is None or bool(quantizer.is_compileable))
        and len({parameter.device for parameter in model.parameters()}) == 1
    )


def _event(device: torch.device) -> Any:
    return torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
