"""The batch of a vLLM engine as its drafter sees it, with requests whose answers are known.

Read from vLLM 0.32.0, `vllm/v1/worker/gpu_model_runner.py` and `gpu_input_batch.py` (the V1 runner, which serves
`custom_class`), and from its scheduler:

- `token_ids_cpu` is int32 [max_num_seqs, max_model_len], `num_tokens_no_spec` int32 [max_num_seqs]. Both hold the
  sampled tokens when `propose` is called; behind a text lie rests of drafts and of texts before it.
- `sampled_token_ids` has a list for each row in use: accepted tokens and one more, or none while a prompt is read.
- A request that is preempted or not scheduled leaves the batch, with its text; later it takes the lowest free row, and
  reads its whole text again, in chunks. Gaps are filled from the last rows, and attention may reorder rows.
- Where a text of the batch has less room than a whole chain, nobody is asked, and zeros are verified in every row.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

VERSION = "0.32.0"


def vllm_config(
    *,
    chain: int | None = 4,
    vocab: int = 50,
    longest: int = 64,
    rows: int = 8,
    tokenizer: str = "nowhere",
    **parallel: int,
) -> Any:
    """Return what a drafter reads of an engine's configuration."""
    return SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=chain, method="custom_class"),
        model_config=SimpleNamespace(max_model_len=longest, tokenizer=tokenizer, get_vocab_size=lambda: vocab),
        scheduler_config=SimpleNamespace(max_num_seqs=rows),
        parallel_config=SimpleNamespace(
            **{
                "rank": 0, "tensor_parallel_size": 1, "prefill_context_parallel_size": 1, "data_parallel_index": 0,
                **parallel,
            }
        ),
    )  # fmt: skip


class Request:
    """A request: its prompt, and the answer that the model will give."""

    def __init__(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        self.answer = [*prompt, *answer]
        self.prompt_size = self.size = len(prompt)
        self.unread = 1
        """Chunks of the text that are still to be read, the last of which gives a token."""
        self.draft: list[int] = []

    @property
    def text(self) -> list[int]:
        return self.answer[: self.size]

    @property
    def over(self) -> bool:
        return self.size == len(self.answer)


class Batch:
    """Rows of requests."""

    def __init__(self, drafter: Any, *, chain: int = 4, longest: int = 64, rows: int = 8) -> None:
        self.drafter, self.chain, self.longest = drafter, chain, longest
        self.rows: list[Request] = []
        self.most = rows
        self.sizes = np.zeros(rows, np.int32)
        self.ids = np.full((rows, longest), -1, np.int32)
        self.passes = 0

    def join(self, request: Request, chunks: int = 1) -> None:
        """Take a request in, or back; its text is read in so many chunks."""
        assert len(self.rows) < self.most
        request.unread, request.draft = chunks, []
        self.rows.append(request)
        self._write(len(self.rows) - 1)

    def leave(self, row: int) -> Request:
        """Take a request out, and fill its row with the last one."""
        gone, last = self.rows[row], self.rows.pop()
        if row < len(self.rows):
            self.rows[row] = last
            self._write(row)
        return gone

    def reorder(self, order: Sequence[int]) -> None:
        """Put other requests into the rows."""
        self.rows = [self.rows[row] for row in order]
        for row in range(len(self.rows)):
            self._write(row)

    def step(self) -> tuple[list[list[int]], list[list[int]]] | None:
        """Run a pass; return the new tokens and drafts of every row, None where vLLM does not ask."""
        fits = max(request.size for request in self.rows) + self.chain <= self.longest
        sampled = [self._sample(row) for row in range(len(self.rows))]
        if not fits:
            for request in self.rows:
                request.draft = [0] * self.chain
            return None
        drafts = self.drafter.propose(sampled, self.sizes, self.ids, slot_mappings={})
        assert len(drafts) == len(self.rows)
        for request, draft in zip(self.rows, drafts, strict=True):
            assert len(draft) <= self.chain
            request.draft = draft
        return sampled, drafts

    def _sample(self, row: int) -> list[int]:
        request = self.rows[row]
        request.unread = max(0, request.unread - 1)
        if request.unread or request.over:
            return []
        self.passes += 1
        rest = request.answer[request.size :]
        right = next(
            (i for i, token in enumerate(request.draft) if rest[i : i + 1] != [token]), len(request.draft)
        )
        new = rest[: right + 1]
        request.size += len(new)
        self._write(row)
        return new

    def _write(self, row: int) -> None:
        text = self.rows[row].text + self.rows[row].draft
        self.ids[row, : min(len(text), self.longest)] = text[: self.longest]
        self.sizes[row] = self.rows[row].size
