"""What SGLang 0.5.23 does with the arrays of its n-gram worker, and the objects that it passes to the worker.

Read from its files `kernels/ops/speculative/reconstruct_tree.py` (links), `srt/speculative/ngram_worker.py` (calls of
the worker), `srt/managers/schedule_batch.py` (requests). `make test-sglang` runs the links in its own server.
"""

from array import array
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Says = Callable[[Sequence[int]], int]
"""A model: the next token of a text."""


class Links(NamedTuple):
    """How SGLang finds its way through the rows of one text: depth, first child and next sibling of each row."""

    depths: list[int]
    children: list[int]
    siblings: list[int]


def links_of(mask: NDArray[Any]) -> Links:
    """Return what SGLang reads from a mask.

    Args:
        mask: bool [n, n].
    """
    rows = range(len(mask))
    above = [[column for column in range(row) if mask[row, column]] for row in rows]
    parents = [max(columns, default=-1) for columns in above]
    return Links(
        [len(columns) for columns in above],
        [min((row for row in rows if parent in above[row]), default=-1) for parent in rows],
        [
            min((row for row in rows if row > one and parents[row] == parents[one] >= 0), default=-1)
            for one in rows
        ],
    )


def verify(tokens: NDArray[Any], mask: NDArray[Any], text: Sequence[int], says: Says) -> list[int]:
    """Return what SGLang emits for one text, greedy: what the model says along the accepted rows.

    Args:
        tokens: int64 [n].
        mask: bool [n, n].
        text: the whole text; its last token is row 0.
        says: the model, which sees the text up to its last token and the rows that a row attends to.
    """
    links, row, emitted = links_of(mask), 0, []
    while row >= 0:
        seen = [*text[:-1], *(int(tokens[column]) for column in np.flatnonzero(mask[row]))]
        emitted.append(says(seen))
        row = links.children[row]
        while row >= 0 and tokens[row] != emitted[-1]:
            row = links.siblings[row]
    return emitted


class Request:
    """A request as workers see it."""

    def __init__(self, rid: str, prompt: Sequence[int], params: Mapping[str, Any] | None = None) -> None:
        self.rid = rid
        self.origin_input_ids_unpadded = array("q", prompt)
        self.output_ids = array("q")
        self.sampling_params = SimpleNamespace(custom_params=params)
        self.tokenizer: Any = None


class Accepted(NamedTuple):
    """What a step tells the next one with overlap: `accept_tokens` [requests * rows] and `accept_lens` [requests]."""

    accept_tokens: NDArray[np.int32]
    accept_lens: NDArray[np.int32]


class Batch:
    """What a worker sees of a `ScheduleBatch`."""

    def __init__(self, reqs: Sequence[Request], spec_info: Accepted | None, *, grammar: bool = False) -> None:
        self.reqs = reqs
        self.spec_info = spec_info
        self._grammar = grammar

    def grammar_needs_sync(self) -> bool:
        return self._grammar


class NgramWorker:
    """What a subclass of `NGRAMWorker` finds: its attributes, and what it calls in a step of decoding."""

    def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any) -> None:
        self.enable_overlap: bool = not server_args.disable_overlap_schedule
        self.draft_token_num: int = server_args.speculative_num_draft_tokens
        self.topk: int = server_args.speculative_eagle_topk
        self.ngram_corpus: Any = None
        self._prev_decode_rids: set[str] = set()
        self.says: Says = target_worker.says

    def _prepare_draft_tokens(self, batch: Batch) -> tuple[NDArray[Any], NDArray[Any]]:
        raise NotImplementedError

    def _update_ngram_corpus(self, batch: Batch) -> None:
        self.ngram_corpus.batch_put([])

    def decode(self, batch: Batch, texts: Sequence[Sequence[int]]) -> list[list[int]]:
        """Return what a step emits for each request; `texts` are whole, as the model's cache has them."""
        bs, rows = len(batch.reqs), self.draft_token_num
        tokens, mask = self._prepare_draft_tokens(batch)
        assert tokens.dtype == np.int64
        assert len(tokens) == bs * rows
        assert len(mask) == bs * rows * rows
        found = []
        for text, row, seen in zip(
            texts, tokens.reshape(bs, rows), mask.reshape(bs, rows, rows), strict=True
        ):
            assert row[0] == text[-1]
            found.append(verify(row, seen, text, self.says))
        self._update_ngram_corpus(batch)
        rids = {request.rid for request in batch.reqs}
        if departed := self._prev_decode_rids - rids:
            self.ngram_corpus.erase_match_state(list(departed))
        self._prev_decode_rids = rids
        return found

    def note_request_finished(self, *, rid: str, natural_stop: bool) -> None:
        pass

    def clear_cache_pool(self) -> None:
        self.ngram_corpus.reset()


class Engine:
    """A scheduler: with overlap, `output_ids` are one step behind, and one step too many is decoded."""

    def __init__(self, worker: NgramWorker, longest: int = 24) -> None:
        self.worker, self.longest = worker, longest
        self.running: list[Request] = []
        self._pending: dict[str, list[int]] = {}

    def join(self, request: Request) -> None:
        """Prefill a request, new or put back before."""
        self._pending[request.rid] = [self.worker.says(self._settled(request))]
        if not self.worker.enable_overlap:
            self._settle(request)
        self.running.append(request)

    def leave(self, request: Request) -> None:
        """Take a request out of the batch; what was not settled is lost."""
        self.running.remove(request)
        self._pending.pop(request.rid, None)

    def step(self) -> list[Request]:
        """Decode once; return the requests that have ended, which are out of the batch."""
        if not self.running:
            return []
        bs, rows = len(self.running), self.worker.draft_token_num
        texts = [self._settled(each) + self._pending.get(each.rid, []) for each in self.running]
        info = None
        if self.worker.enable_overlap:
            last = [self._pending[each.rid] for each in self.running]
            padded = np.zeros((bs, rows), np.int32)
            for place, new in enumerate(last):
                padded[place, : len(new)] = new
            info = Accepted(padded.ravel(), np.array([len(new) for new in last], np.int32))
        emitted = self.worker.decode(Batch(list(self.running), info), texts)
        ended = []
        for request, new in zip(list(self.running), emitted, strict=True):
            if self.worker.enable_overlap:
                self._settle(request)
            self._pending[request.rid] = new
            if not self.worker.enable_overlap:
                self._settle(request)
            if len(request.output_ids) >= self.longest:
                self.leave(request)
                self.worker.note_request_finished(rid=request.rid, natural_stop=False)
                ended.append(request)
        return ended

    def _settle(self, request: Request) -> None:
        request.output_ids.extend(self._pending.pop(request.rid))

    def _settled(self, request: Request) -> list[int]:
        return [*request.origin_input_ids_unpadded, *request.output_ids]


def plain(prompt: Sequence[int], says: Says, count: int) -> list[int]:
    """Return what a model says without drafts."""
    text = list(prompt)
    for _ in range(count):
        text.append(says(text))
    return text[len(prompt) :]


def server_args(**settings: Any) -> Any:
    """Return `ServerArgs` as plug-ins see them, with what its command line leaves open."""
    defaults = {
        "device": "cuda", "attn_dp_size": 1, "page_size": 1, "attention_backend": "triton",
        "speculative_num_draft_tokens": None, "speculative_num_steps": None, "speculative_eagle_topk": None,
        "speculative_ngram_max_bfs_breadth": 10, "speculative_ngram_capacity": 10_000_000,
        "speculative_ngram_external_corpus_path": None, "max_running_requests": None,
        "disable_overlap_schedule": False, "enable_mixed_chunk": True, "tokenizer_path": None, "model_path": "model",
    }  # fmt: skip
    return SimpleNamespace(**{**defaults, **settings})
