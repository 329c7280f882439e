"""Drafts inside SGLang: `--speculative-algorithm DRAFTSTORE`, a plug-in for its entry point `sglang.srt.plugins`.

SGLang verifies a tree for every request in every step. Its n-gram worker does all of that; here it gets different
drafts, from the whole text of each request. The algorithm reports the same properties as NGRAM. A request may contain
`"custom_params": {"draftstore": {"corpus": "acme", "budget": 8, "prediction": "..."}}`. Written for SGLang 0.5.23.
"""

import inspect
import logging
from array import array
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftstore.engines.config import EngineConfig, tokenizer_identity
from draftstore.engines.figures import serve_metrics
from draftstore.engines.proposer import Proposer
from draftstore.errors import EngineError
from draftstore.trees.batch import DraftBatch, rows_and_mask

LOG = logging.getLogger(__name__)
NAME = "DRAFTSTORE"
MAX_CHARACTERS, MAX_TOKENS = 1 << 16, 1 << 14
"""Maximum length of a prediction, as text and as ids: the scheduler tokenizes it while all requests wait."""
TRIE_NODES = 1024
"""Capacity of the unused n-gram tree that SGLang's worker creates; with the default, it takes 100 MB."""


def register() -> None:
    """Register the algorithm; SGLang calls this in each of its processes."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    add = SpeculativeAlgorithm.register(NAME, supports_overlap=True, spec_class=_algorithm())
    add(lambda _server_args: _worker())


def _algorithm() -> type:
    """Return the class of the algorithm: all methods except those for worker and settings are the same as for NGRAM."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    from sglang.srt.speculative.spec_registry import CustomSpecAlgo

    class StoreAlgorithm(CustomSpecAlgo):  # type: ignore[misc]
        def handle_server_args(self, server_args: Any) -> None:
            settle(server_args)

    # Classes of plug-ins lack methods that the scheduler calls, such as `create_future_map`.
    for name, method in vars(SpeculativeAlgorithm).items():
        own = name.startswith("_") or name in ("create_worker", "handle_server_args")
        if inspect.isfunction(method) and not own:
            setattr(StoreAlgorithm, name, _as_ngram(getattr(SpeculativeAlgorithm.NGRAM, name)))
    return StoreAlgorithm


def _as_ngram(answer: Any) -> Any:
    def method(_self: Any, *args: Any, **kwargs: Any) -> Any:
        return answer(*args, **kwargs)

    return method


def settle(server_args: Any) -> None:
    """Fill in unset command line options and reject unsupported ones before a model is loaded, as for NGRAM.

    Args:
        server_args: SGLang's arguments, with attributes that can be read and written.

    Raises:
        EngineError: our settings cannot be read, or SGLang's are incompatible with trees.
    """
    config = EngineConfig.read()
    if server_args.device not in ("cuda", "cpu", "xpu"):
        raise EngineError(f"device {server_args.device!r}: SGLang verifies trees on cuda, cpu or xpu")
    if (server_args.attn_dp_size or 1) > 1:
        raise EngineError(
            "SGLang does not verify n-gram trees with data-parallel attention: remove that option"
        )
    if server_args.speculative_num_draft_tokens is None:
        server_args.speculative_num_draft_tokens = max(2, config.budget + 1)
    rows, breadth = server_args.speculative_num_draft_tokens, server_args.speculative_ngram_max_bfs_breadth
    if rows < 2:
        raise EngineError(
            f"--speculative-num-draft-tokens {rows}: the first token is not a draft, pass 2 or more"
        )
    if breadth > 1 and (server_args.page_size or 1) > 1 and server_args.attention_backend != "flashinfer":
        raise EngineError(
            f"pages of {server_args.page_size} tokens: trees need --page-size 1 or --attention-backend flashinfer; or "
            "verify chains with --speculative-ngram-max-bfs-breadth 1"
        )
    server_args.speculative_eagle_topk = breadth
    if server_args.speculative_num_steps is None:
        server_args.speculative_num_steps = max(1, rows // breadth)
    if server_args.max_running_requests is None:
        server_args.max_running_requests = 48
    if server_args.device == "cpu":
        server_args.disable_overlap_schedule = True
    server_args.enable_mixed_chunk = False
    server_args.speculative_ngram_capacity = TRIE_NODES
    server_args.speculative_ngram_external_corpus_path = None


class _Text:
    """A request's text: a prompt of this size, its first outputs, which are `settled`, and the ids `after` these."""

    def __init__(self, outputs: Sequence[int], prompt: int, slot: int, budget: int) -> None:
        self.outputs, self.prompt, self.slot, self.budget = outputs, prompt, slot, budget
        self.settled, self.after = 0, list[int]()


class BatchDrafts:
    """Drafts for batches of SGLang's requests; replaces the n-gram corpus of its worker.

    Attributes:
        proposer: makes the drafts.
        rows: number of tokens verified for each request: the last token of its text, and a tree.
    """

    def __init__(self, proposer: Proposer, rows: int) -> None:
        """Draft trees of up to `rows - 1` nodes with a proposer."""
        self.proposer, self.rows = proposer, rows
        self._texts: dict[str, _Text] = {}
        rows_and_mask(DraftBatch.empty(1), [0], rows)  # compile it before the first request

    def __len__(self) -> int:
        """Return the number of remembered requests."""
        return len(self._texts)

    def draft(
        self, requests: Sequence[Any], pending: Sequence[Sequence[int]]
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return the arrays of a step, see `draftstore.trees.batch.rows_and_mask`.

        Args:
            requests: `Req` of SGLang, or objects with its `rid`, `origin_input_ids_unpadded`, `output_ids`, `tokenizer`
                and `sampling_params.custom_params`.
            pending: tokens of each that are accepted but not yet in its `output_ids`.
        """
        ids, rows, lasts = array("i"), list[tuple[int, int, int]](), list[int]()
        for request, new in zip(requests, pending, strict=True):
            slot, budget = self._read(request, new, ids)
            rows.append((slot, len(ids), budget))
            lasts.append(_last(request, new))
        slots, stops, budgets = np.array(rows, np.int64).reshape(-1, 3).T.copy()
        batch = self.proposer.propose(slots, np.array(ids, np.int32), stops, budgets)
        if gone := self.proposer.forgotten:
            self._texts = {rid: text for rid, text in self._texts.items() if text.slot not in gone}
        return rows_and_mask(batch, lasts, self.rows)

    def _read(self, request: Any, pending: Sequence[int], ids: "array[int]") -> tuple[int, int]:
        """Append the new ids of a request's text; return its slot and budget. Never raises.

        The slot of a request that cannot be read is that of an empty text.
        """
        size = len(ids)
        try:
            text, outputs = self._texts.get(request.rid), request.output_ids
            if text is not None and (text.outputs is not outputs or len(outputs) < text.settled):
                self.erase_match_state([request.rid])  # it belongs to another request
                text = None
            after = [*outputs[text.settled if text else 0 :], *pending]
            if text is not None and after[: len(text.after)] == text.after:
                ids.extend(after[len(text.after) :])
            else:
                if text is not None:  # retracted, it has lost pending tokens
                    self.proposer.forget([text.slot], ended=False)
                    after[:0] = outputs[: text.settled]
                text = self._texts[request.rid] = self._start(request, after)
            text.settled, text.after = len(outputs), [*pending]
        except Exception as error:  # noqa: BLE001 (an engine must not crash, nor its other ranks hang)
            del ids[size:]
            self.proposer.failed("no draft for a request", error)
            return self.proposer.start(()), 0
        return text.slot, text.budget

    def _start(self, request: Any, answer: list[int]) -> _Text:
        prompt = request.origin_input_ids_unpadded
        budget, wishes = _wishes(request)
        most = self.proposer.budget
        slot = self.proposer.start([*prompt, *answer], **wishes)
        return _Text(
            request.output_ids, len(prompt), slot, most if budget is None else max(0, min(budget, most))
        )

    def erase_match_state(self, rids: Iterable[str]) -> None:
        """Forget requests that have left the batch; one that comes back is read again."""
        for rid in rids:
            text = self._texts.pop(rid, None)
            if text is not None:
                self.proposer.complete(text.slot, text.prompt, text.outputs)
                self.proposer.forget([text.slot])

    def reset(self) -> None:
        """Forget all requests."""
        self.erase_match_state(list(self._texts))

    def synchronize(self) -> None:
        """Do nothing: there is no thread to wait for."""

    def batch_put(self, batch_tokens: Sequence[Sequence[int]]) -> None:
        """Do nothing: the whole text comes with the next step."""

    def list_external_corpora(self) -> dict[str, int]:
        """Return an empty dictionary: corpora are settings."""
        return {}


def _last(request: Any, pending: Sequence[int]) -> int:
    parts = (pending, request.output_ids, request.origin_input_ids_unpadded)
    return next((int(part[-1]) for part in parts if part), 0)


def _wishes(request: Any) -> tuple[int | None, dict[str, Any]]:
    """Return the budget, and options of `Proposer.start`, in `custom_params`; invalid ones: an unknown corpus."""
    params = request.sampling_params.custom_params
    wishes = params.get("draftstore") if isinstance(params, Mapping) else None
    if wishes is None:
        return None, {}
    if not isinstance(wishes, Mapping):
        return 0, {"corpus": f"{wishes!r}", "live": False}
    budget, prediction = wishes.get("budget"), wishes.get("prediction")
    return budget if isinstance(budget, int) else None, {
        "corpus": str(wishes.get("corpus") or ""),
        "live": wishes.get("live") is not False,
        "prediction": partial(_prediction, request, prediction) if prediction else None,
    }


def _prediction(request: Any, given: Any) -> Sequence[int]:
    if isinstance(given, str):
        given = request.tokenizer.encode(given[:MAX_CHARACTERS], add_special_tokens=False)
    found: Sequence[int] = given[:MAX_TOKENS]
    return found


class StoreDrafts:
    """The differences from SGLang's `NGRAMWorker`, which it precedes among the bases of the worker."""

    enable_overlap: bool
    draft_token_num: int
    topk: int

    def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any) -> None:
        """Initialise SGLang's worker, and open all sources in the first rank."""
        super().__init__(server_args, gpu_id, nccl_port, target_worker)  # type: ignore[call-arg]
        self._ranks = self._tensor_parallel()
        config = EngineConfig.read() if self._drafts_here else EngineConfig(request=False)
        if config.budget > 0:
            config = config.changed(budget=max(1, self.draft_token_num - 1))
        model, longest = target_worker.model_runner.model_config, self.draft_token_num - 1
        tokenizer = tokenizer_identity(config, server_args.tokenizer_path or server_args.model_path)
        proposer = Proposer(
            config, engine="sglang", vocab_size=model.vocab_size, tokenizer=tokenizer,
            model=server_args.model_path, chain=longest if self.topk == 1 else None, fixed_rows=True,
        )  # fmt: skip
        LOG.info("%s; trees of at most %d nodes", proposer.sources, longest)
        if config.metrics is not None:
            _serve(proposer, config.metrics)
        self.ngram_corpus = BatchDrafts(proposer, self.draft_token_num)

    def _tensor_parallel(self) -> Any:
        from sglang.srt.runtime_context import get_parallel

        return get_parallel().tp_group

    @property
    def _drafts_here(self) -> bool:
        return bool(self._ranks.rank_in_group == 0)

    def _prepare_draft_tokens(self, batch: Any) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        if self._ranks.world_size == 1:
            return self.ngram_corpus.draft(batch.reqs, self._pending(batch))
        import torch

        # All ranks must verify the same tree, so the first one drafts for all: a lookup that timed out in just one
        # rank would make them diverge.
        rows = len(batch.reqs) * self.draft_token_num
        tokens, mask = np.empty(rows, np.int64), np.empty(rows * self.draft_token_num, np.bool_)
        if self._drafts_here:
            tokens, mask = self.ngram_corpus.draft(batch.reqs, self._pending(batch))
        for part in (tokens, mask.view(np.uint8)):
            torch.distributed.broadcast(
                torch.from_numpy(part), src=self._ranks.ranks[0], group=self._ranks.cpu_group
            )
        return tokens, mask

    def _pending(self, batch: Any) -> list[list[int]]:
        """Return the accepted tokens that are not yet in `output_ids`: with overlap, those of the last step."""
        if not self.enable_overlap or batch.grammar_needs_sync():
            return [[]] * len(batch.reqs)
        rows, tokens = self.draft_token_num, batch.spec_info.accept_tokens.tolist()
        counts = batch.spec_info.accept_lens.tolist()
        return [tokens[text * rows : text * rows + count] for text, count in enumerate(counts)]

    def _update_ngram_corpus(self, batch: Any) -> None:
        """Do nothing: the whole text comes with the next step."""

    def note_request_finished(self, *, rid: str, natural_stop: bool) -> None:  # noqa: ARG002
        """Forget a request that has just ended, and store its answer; otherwise SGLang waits for another step."""
        self.ngram_corpus.erase_match_state([rid])


def _serve(proposer: Proposer, address: str) -> None:
    """Serve metrics, unless the port is taken by another replica on this machine."""
    try:
        serve_metrics(proposer.figures, address)
    except EngineError as error:
        LOG.warning("%s", error)


def _worker() -> type:
    from sglang.srt.speculative.ngram_worker import NGRAMWorker

    return type("DraftstoreWorker", (StoreDrafts, NGRAMWorker), {})
