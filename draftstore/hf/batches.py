"""The engine: decoding of any number of texts together, with one forward pass over all their drafts.

    batch = Batch(model)
    batch.join(member)                        at any time; its prompt is prefilled in chunks between passes
    for member, result in batch.step(): ...   one pass: a `Step` for every text
    batch.leave(member)                       at any time between steps; finished texts leave automatically

Every text has its own slot in a pool of keys and values (`draftstore.hf.pools`), and its own positions, mask, choice of
tokens, random numbers, drafts and stopping criteria, so its output is the same as without other texts. A pass reads as
many rows of each text as the largest draft needs: `draftstore.decoding.budget.trim_together` chooses their number.

    slots     0, 1, 2, ...     texts in decoding; when one leaves, the last one takes its place
              the last slot    the text whose prompt is being read
"""

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from time import perf_counter_ns
from typing import Any, cast

import numpy as np
import torch

from draftstore.decoding.acceptance import Acceptance
from draftstore.decoding.loop import QueuedPass, Step
from draftstore.drafting.slots import Slots
from draftstore.errors import DecodingError
from draftstore.hf.checks import NO_LIMIT, decodes_otherwise, recompute_length, takes_single_texts, vocab_size
from draftstore.hf.exactness import require_exact
from draftstore.hf.loading import positions_of
from draftstore.hf.members import Member
from draftstore.hf.outputs import BatchOutputs
from draftstore.hf.passes import Rows, Wants
from draftstore.hf.runner import (
    LEAST_WIDTH,
    MAX_ROWS,
    TEXTS,
    Drafted,
    Runner,
    padded,
    return_runner,
    take_runner,
)
from draftstore.trees.batch import DraftBatch
from draftstore.trees.tree import DraftTree

MAX_TEXTS = TEXTS[-1]
CHUNK, CHUNK_ALONE = 512, 4096
"""Tokens of prompts that are read between two passes; the second is for when no other text waits."""
MOST_SPARE = 0.5
"""Maximum share of spare rows in a pass over several prompts."""
LEFT = DecodingError("the text has left the batch")
"""The error of a text that has left while a pass over it is queued."""


class Batch:
    """Texts that are decoded together, in one thread.

    Attributes:
        most: maximum texts in decoding; others wait until one leaves.
        positions: maximum tokens of a text that fit into memory regardless of the others.
    """

    def __init__(
        self,
        model: Any,
        *,
        most: int = MAX_TEXTS,
        tokens: int | None = None,
        chunk: int | None = None,
        ahead: bool | None = None,
    ) -> None:
        """Prepare an empty batch; DecodingError if the model does not support drafts, or a text would not fit.

        Args:
            most: see the attribute; at most 64, and 1 for a model that takes one text at a time.
            tokens: maximum tokens of all texts together; None: as many as fit into memory.
            chunk: tokens of prompts that are read in a step; None: a default. Models that take one text read it whole.
            ahead: whether `step` queues the next pass before it returns the results of the last; None: on a GPU.
        """
        require_exact(model)
        whole = takes_single_texts(model)  # its rotations depend on the highest position in a pass
        self.most = 1 if whole else max(1, min(most, MAX_TEXTS))
        self._model = model
        self._chunk, self._chunk_alone = (
            NO_LIMIT if whole else chunk or each for each in (CHUNK, CHUNK_ALONE)
        )
        self._otherwise = decodes_otherwise(model)
        self._vocab_size, self._recompute_length = vocab_size(model), recompute_length(model)
        self._members: list[Member] = []
        self._reading: deque[Member] = deque()
        self._slots = Slots()
        self._queued: QueuedPass | None = None
        self._failed: Exception | None = None
        self._stepping = False
        self._ahead = model.device.type == "cuda" if ahead is None else ahead
        self._runner = take_runner(model, self.most)
        pool = self._runner.pool
        each = (pool.most_tokens() if tokens is None else tokens) // pool.slots
        self.positions = max(each, pool.length) - MAX_ROWS  # existing room takes no more memory
        if self.positions < 1:
            raise DecodingError(
                f"{tokens or pool.most_tokens():,} tokens are too few for {self.most} texts and the rows of a pass: "
                f"allow {pool.slots * 2 * MAX_ROWS:,}, or decode fewer texts together"
            )

    def close(self) -> None:
        """Hand memory and graphs over to the next batch of this model."""
        if self._queued is not None:
            self._queued.discard(LEFT)
        return_runner(self._model, self._runner)

    def __len__(self) -> int:
        """Return the number of texts, including those whose prompts are being read."""
        return sum(member.error is not LEFT for member in self._members) + len(self._reading)

    def join(self, member: Member) -> None:
        """Add a text; DecodingError if its prompt is empty, too long, or has ids that the model lacks."""
        prompt = member.prompt
        if member.past or member in self._reading:
            raise DecodingError("a text joins once: prepare another one with the same prompt")
        if len(prompt) == 0:
            raise DecodingError("the prompt is empty, expected at least one token")
        if not 0 <= prompt.min() <= prompt.max() < self._vocab_size:  # otherwise all texts would fail
            raise DecodingError(f"the prompt has ids outside the model's vocabulary of {self._vocab_size:,}")
        if len(prompt) > self.positions:
            raise DecodingError(
                f"a prompt of {len(prompt):,} tokens exceeds the memory of {self.positions:,} tokens for each of "
                f"{self.most} texts: shorten it, or decode fewer together"
            )
        self._reading.append(member)

    def leave(self, member: Member) -> None:
        """Remove a text between two steps, whether or not it has ended; no effect if it is not in the batch.

        DecodingError in a step, as from its streamer or criteria: these may end the text itself.
        """
        if self._stepping:
            raise DecodingError("a text can leave between two steps only")
        self._leave(member)

    def _leave(self, member: Member) -> None:
        if member in self._reading:
            self._reading.remove(member)
        elif member in self._members:
            if self._queued is None:
                self._remove(member)
                return
            self._queued.discard(LEFT, [member])
            if all(each.error is LEFT for each in self._members):
                self._queued = None
                for each in self._members[::-1]:
                    self._remove(each)

    def _remove(self, member: Member) -> None:
        """Give the slot of a text to the last one."""
        slot, last = self._members.index(member), self._members[-1]
        if last is not member:
            self._runner.pool.copy(len(self._members) - 1, slot, last.past)
            self._members[slot] = last
        self._members.pop()
        self._slots.leave(member.session.slot)

    @torch.no_grad()
    def step(self) -> list[tuple[Member, Step | Exception]]:
        """Run one pass over all texts whose prompts have been read, then read up to a chunk of prompts.

        Returns each text of the pass, and each whose prompt was completed, with its new tokens (for the latter with an
        empty tree) or its error. One that is over or has failed has left. MemoryError, on a GPU torch's
        OutOfMemoryError, if the pool cannot grow: all texts are lost.

        On a GPU, the next pass is queued before the results of the last are made, so the GPU works while they, and
        whatever the caller does with them, take the host's time. A text that leaves meanwhile is left out.
        """
        failed, self._failed, self._stepping = self._failed, None, True
        try:
            if failed is not None and self._members:
                raise failed
            return self._step()
        finally:
            self._stepping = False

    def _step(self) -> list[tuple[Member, Step | Exception]]:
        if not self._ahead:
            self._queue()
        done, self._queued = self._queued, None
        if done is not None:
            try:
                done.finish()
            finally:
                for member in [each for each in self._members if each.over or each.error is not None]:
                    self._remove(member)
        read = self._read()  # a pass may write to the slots after its texts, so new ones come only now
        if self._ahead:
            try:
                self._queue()
            except Exception as error:
                if done is None and not read:
                    raise
                self._failed = error  # raised by the next step, after these results
        return [*(() if done is None else self._results(done)), *read]

    def _queue(self) -> None:
        """Draft for the texts in decoding, and queue the pass that verifies."""
        if self._members:
            with self._model._optimize_model_for_decode() if self._otherwise else nullcontext():
                self._queued = QueuedPass(self._members, self)

    def _results(self, done: QueuedPass) -> Iterator[tuple[Member, Step | Exception]]:
        """Yield the results of a pass; a text that fails only now leaves."""
        for text, result in zip(done.texts, done.results(), strict=True):
            member = cast("Member", text)
            if result is LEFT:
                continue
            if isinstance(result, Exception):
                self._leave(member)
            yield member, result

    def room(self) -> int:
        """Return the maximum nodes of a draft now."""
        return self._runner.room(len(self._members)) - 1

    def verify(self, drafts: DraftBatch) -> BatchOutputs:
        """Run a forward pass over the texts in decoding; see `draftstore.decoding.loop.Model`."""
        members = [*self._members]
        lasts, pasts = np.array([(member.text.last, member.past) for member in members], np.int64).T
        runner = self._reserve(int((pasts + drafts.sizes).max()) + 1)
        for member in members:  # a model that rereads has only one
            if member.past == self._recompute_length == len(member.text) - 1:
                runner.read(0, [member.text.ids.astype(np.int64)], 0, Wants(best=False))
        wants = Wants.of({member.wants for member in members})
        return BatchOutputs(runner.run(Drafted(lasts, drafts, pasts), wants), drafts, members)

    def keep(self, accepted: Sequence[Acceptance | None]) -> None:
        """Append accepted tokens to the texts in decoding; see `draftstore.decoding.loop.Model`."""
        pasts = [member.past for member in self._members]
        kept = [member.keep(each) for member, each in zip(self._members, accepted, strict=True)]
        self._runner.pool.move(pasts, kept)

    def _read(self) -> list[tuple[Member, Step | Exception]]:
        """Read up to a chunk of prompts, in order of arrival."""
        results: list[tuple[Member, Step | Exception]] = []
        left, alone = self._chunk if self._members else self._chunk_alone, 0
        while left > 0 and self._reading and len(self._members) < self.most:
            begin = perf_counter_ns()
            group = self._next_prompts(1 if alone else self.most - len(self._members), left)
            alone = max(0, alone - 1)
            runner = self._reserve(max(len(member.prompt) for member in group))
            slot = len(self._members) if len(group) > 1 else runner.pool.slots - 1
            tokens = [member.prompt[member.past : member.past + left] for member in group]
            try:
                candidates = group[0].prompt_candidates(self._vocab_size)
                wants = Wants.of(member.first_wants for member in group)
                parts = runner.read(slot, tokens, group[0].past, wants, candidates)
            except Exception as error:  # noqa: BLE001 (of one text: each of several is read alone)
                if len(group) > 1:
                    alone = len(group)
                else:
                    results.append((self._reading.popleft(), error))
                continue
            for place, (member, read, rows) in enumerate(zip(group, tokens, parts, strict=True), slot):
                member.past += len(read)
                left -= len(read)
                if member.past == len(member.prompt):
                    self._reading.popleft()
                    results.append(self._begin(member, rows, begin, place))
        return results

    def _next_prompts(self, most: int, left: int) -> list[Member]:
        """Return the next text, or several whose prompts fit into one pass of `left` tokens without much waste."""
        group: list[Member] = []
        longest = total = 0
        for member in itertools.islice(self._reading, most):
            longest, total = max(longest, len(member.prompt)), total + len(member.prompt)
            wasteful = longest * (len(group) + 1) * MOST_SPARE > total
            if member.past or member.gathers or wasteful or total > left:
                break
            group.append(member)
        return group or [self._reading[0]]

    def _begin(self, member: Member, rows: Rows, begin: int, slot: int) -> tuple[Member, Step | Exception]:
        """Emit the first token of a text in a slot; unless that ends the text, move it to the slot after the others."""
        filled = perf_counter_ns()
        try:
            accepted = member.begin(rows, self._model, self._slots)
        except Exception as error:  # noqa: BLE001 (of this text alone)
            return member, error
        if not member.over:
            self._runner.pool.copy(slot, len(self._members), member.past)
            self._members.append(member)
        done = perf_counter_ns()
        return member, Step(DraftTree.empty(), [], accepted.tokens, 0, filled - begin, done - filled)

    def _reserve(self, length: int) -> Runner:
        """Return the runner, with room for texts of a length and the rows of a pass after them."""
        # On a GPU all memory is allocated up front, since graphs contain its addresses.
        pool = self._runner.pool
        wanted = length + MAX_ROWS
        if pool.length < wanted:
            most = self.positions + MAX_ROWS
            if self._runner.graphs:
                wanted = max(wanted, min(most, (positions_of(self._model) or most) + MAX_ROWS))
            wanted = max(wanted, min(pool.length * 3 // 2, most))
            used = max(member.past for member in (*self._members, *self._reading))
            pool.resize(-(-wanted // LEAST_WIDTH) * LEAST_WIDTH, used, len(self._members))
            self._runner.forget()
        return self._runner


def tokens_for(texts: int, length: int) -> int:
    """Return the tokens that a batch needs for texts of a given length, including spare slots and rows of a pass."""
    return (1 if texts == 1 else padded(texts, TEXTS) + 1) * (length + MAX_ROWS)
