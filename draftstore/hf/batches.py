"""Decoding of several texts together: one forward pass over the drafts of all of them.

    batch = Batch(model)
    batch.join(member)                        at any time; its prompt is read in pieces between passes
    for outcome in batch.step(): ...          one pass: a `Step` for every text
    batch.leave(member)                       at any time between steps; a text that has ended leaves by itself

Every text lies in its own slot of a pool of keys and values (`draftstore.hf.pools`) and has its own positions, mask,
choice of tokens, random numbers, drafts and end, so its output is that of the text alone. A pass reads as many rows of
each text as the largest draft needs: `draftstore.decoding.budget.trim_together` chooses how many are worth it.

    slots     0, 1, 2, ...     texts in decoding; the last one moves to the place of one that leaves
              the last slot    the text whose prompt is being read
"""

import weakref
from collections import deque
from collections.abc import Sequence
from time import perf_counter_ns
from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from draftstore.decoding.loop import Step
from draftstore.errors import DecodingError
from draftstore.hf.checks import rope_settings, sees_whole_text
from draftstore.hf.exactness import require_exact
from draftstore.hf.graph_runner import GraphRunner, captures
from draftstore.hf.graphs import mark_of
from draftstore.hf.loading import positions_of
from draftstore.hf.members import Member, Outcome, Turn, draft_together
from draftstore.hf.pass_shapes import LEAST_WIDTH, MAX_ROWS, TEXTS, padded
from draftstore.hf.passes import Rows, Wants
from draftstore.hf.pools import CachePool, fits_pool
from draftstore.hf.targets import vocab_size
from draftstore.trees.tree import DraftTree

MAX_TEXTS = TEXTS[-1]
CHUNK = 512
"""Tokens of prompts that are read between two passes."""
ATTENTION = ("sdpa", "eager")
"""Attention implementations that take a mask of their own for each text."""


def why_alone(model: Any) -> str | None:
    """Return the reason why a model decodes only one text at a time; None if it takes batches."""
    config = model.config.get_text_config(decoder=True)
    name = type(model).__name__
    if config._attn_implementation not in ATTENTION:
        return f"attention is {config._attn_implementation!r}, expected 'sdpa' or 'eager'"
    if not sees_whole_text(config) or model._is_stateful:
        return f"not every layer of {name} attends to the whole text before a token"
    if not model._supports_attention_backend or model.config.is_encoder_decoder:
        return f"{name} takes no mask and positions of its own for each text"
    for rope in rope_settings(config):
        if rope.get("rope_type") in ("dynamic", "longrope"):
            return (
                f"the positions of {name} depend on the longest text of a batch ({rope['rope_type']!r} RoPE)"
            )
    return None


class Batch:
    """Texts that are decoded together, by one thread.

    Attributes:
        most: maximum texts in decoding; others wait until one leaves.
        positions: maximum tokens of a text, for which there is memory whatever the others have.
        last_pass: texts in the pass of the last step, and the share of the columns that they saw which hold tokens;
            None if that step only read prompts.
    """

    def __init__(
        self, model: Any, *, most: int = MAX_TEXTS, tokens: int | None = None, chunk: int = CHUNK
    ) -> None:
        """Prepare an empty batch.

        Args:
            model: a causal language model of transformers; see `why_alone`.
            most: see the attribute; at most 64.
            tokens: maximum tokens of all texts together; None: what there is memory for.
            chunk: tokens of prompts that are read in a step.

        Raises:
            DecodingError: the model takes no batches, or a text would have no room.
        """
        if why := why_alone(model):
            raise DecodingError(f"no batches: {why}; decode one text at a time")
        self.most = max(1, min(most, MAX_TEXTS))
        self.last_pass: tuple[int, float] | None = None
        self._model = model
        self._chunk = chunk
        self._vocab_size = vocab_size(model)
        self._members: list[Member] = []
        self._reading: deque[Member] = deque()
        self._runner = _take_runner(model, self.most)
        pool = self._runner.pool
        each = (pool.most_tokens() if tokens is None else tokens) // pool.slots
        self.positions = max(each, pool.length) - MAX_ROWS  # what there is already takes no more memory
        if self.positions < 1:
            raise DecodingError(
                f"{tokens or pool.most_tokens():,} tokens are too few for {self.most} texts and the rows of a pass: "
                f"allow {pool.slots * 2 * MAX_ROWS:,}, or decode fewer texts together"
            )

    def close(self) -> None:
        """Leave memory and graphs to the next batch of this model."""
        if captures(self._model.device):
            _IDLE[self._model] = self._runner

    def __len__(self) -> int:
        """Return the number of texts, including those whose prompts are being read."""
        return len(self._members) + len(self._reading)

    def join(self, member: Member) -> None:
        """Add a text.

        Raises:
            DecodingError: drafts would change its output, see `draftstore.hf.exactness`; or its prompt is empty, too
                long, or has ids that the model lacks.
        """
        if member.drafting:
            require_exact(self._model)
        if len(member.prompt) == 0:
            raise DecodingError("the prompt is empty, expected at least one token")
        if (
            not 0 <= member.prompt.min() <= member.prompt.max() < self._vocab_size
        ):  # all texts would fail with it
            raise DecodingError(f"the prompt has ids outside the model's vocabulary of {self._vocab_size:,}")
        if len(member.prompt) > self.positions:
            raise DecodingError(
                f"a prompt of {len(member.prompt):,} tokens, and there is memory for {self.positions:,} of each of "
                f"{self.most} texts: shorten it, or decode fewer together"
            )
        self._reading.append(member)

    def leave(self, member: Member) -> None:
        """Remove a text, whether or not it has ended; one that is not here is passed over."""
        if member in self._reading:
            self._reading.remove(member)
        elif member in self._members:
            slot, last = self._members.index(member), self._members.pop()
            if last is not member:
                self._runner.pool.copy(len(self._members), slot, last.past)
                self._members[slot] = last

    @torch.no_grad()
    def step(self) -> list[Outcome]:
        """Run one pass over all texts that are past their prompts, then read prompts, up to a chunk.

        Returns:
            Outcomes of the pass, and of texts whose prompts were read to the end, each with an empty tree.
        """
        outcomes: list[Outcome] = []
        self.last_pass = None
        if self._members:
            with self._model._optimize_model_for_decode():
                outcomes += self._pass([Turn(member) for member in self._members])
            for outcome in outcomes:
                if outcome.error is not None or outcome.member.generated.over:
                    self.leave(outcome.member)
        # A pass may write to the slots behind its texts, so others come only now.
        return outcomes + self._read()

    def _read(self) -> list[Outcome]:
        """Read up to a chunk of prompts, in the order in which they came."""
        outcomes: list[Outcome] = []
        left = self._chunk
        while left > 0 and self._reading and len(self._members) < self.most:
            member = self._reading[0]
            runner = self._reserve(len(member.prompt))
            begin = perf_counter_ns()
            tokens = member.prompt[member.past : member.past + left]
            try:
                prompt_candidates = member.prompt_candidates(self._vocab_size)
                rows = runner.read(
                    runner.pool.slots - 1, tokens, member.past, member.first_wants, prompt_candidates
                )
            except Exception as error:  # noqa: BLE001 (of this text alone, as where there is no memory for its rows)
                outcomes.append(Outcome(self._reading.popleft(), None, error))
                continue
            member.past += len(tokens)
            left -= len(tokens)
            if member.past == len(member.prompt):
                self._reading.popleft()
                outcomes.append(self._begin(member, rows, begin))
        return outcomes

    def _begin(self, member: Member, rows: Rows, begin: int) -> Outcome:
        """Emit a text's first token; it moves to a slot of its own unless that ends it."""
        filled = perf_counter_ns()
        try:
            accepted = member.begin(rows, self._model, self._room)
        except Exception as error:  # noqa: BLE001 (of this text alone)
            return Outcome(member, None, error)
        if not member.generated.over:
            pool = self._runner.pool
            pool.copy(pool.slots - 1, len(self._members), member.past)
            self._members.append(member)
        done = perf_counter_ns()
        return Outcome(member, Step(DraftTree.empty(), [], accepted.tokens, 0, filled - begin, done - filled))

    def _pass(self, turns: Sequence[Turn]) -> list[Outcome]:
        """Propose, run a forward pass, accept: for the texts of the first slots."""
        begin = perf_counter_ns()
        draft_together(turns, self._vocab_size)
        drafted = perf_counter_ns()
        entries = [turn.entry() for turn in turns]
        runner = self._reserve(max(entry.past + len(entry.tokens) for entry in entries))
        wants = Wants(*map(any, zip(*(turn.wants for turn in turns), strict=True)))
        parts = runner.run(entries, wants)
        tokens = sum(entry.past + len(entry.tokens) for entry in entries)
        self.last_pass = len(turns), tokens / runner.columns
        verified = perf_counter_ns()
        for turn, part in zip(turns, parts, strict=True):
            turn.accept(part)
        runner.pool.move([entry.past for entry in entries], [turn.kept() for turn in turns])
        for turn in turns:
            turn.learn()
        done = perf_counter_ns()
        shares = [each // len(turns) for each in (drafted - begin, verified - drafted, done - verified)]
        return [turn.outcome(*shares) for turn in turns]

    # --- memory ---

    def _room(self) -> int:
        """Return the maximum nodes of a draft in the next pass."""
        return self._runner.room(len(self._members)) - 1

    def _reserve(self, length: int) -> GraphRunner:
        """Return the runner, with room for texts of a length and for the rows of a pass behind them."""
        # On a GPU all memory is taken at once, since graphs know its addresses.
        pool = self._runner.pool
        wanted = length + MAX_ROWS
        if pool.length < wanted:
            most = self.positions + MAX_ROWS
            if captures(self._model.device):
                wanted = max(wanted, min(most, (positions_of(self._model) or most) + MAX_ROWS))
            wanted = max(wanted, min(pool.length * 3 // 2, most))
            used = max(member.past for member in (*self._members, *self._reading))
            pool.resize(-(-wanted // LEAST_WIDTH) * LEAST_WIDTH, used, len(self._members))
            self._runner.forget()
        return self._runner


def tokens_for(texts: int, length: int) -> int:
    """Return the tokens that a batch of some texts of a length must have room for: slots, and rows of a pass, count."""
    return (padded(texts, TEXTS) + 1) * (length + MAX_ROWS)


_IDLE: "weakref.WeakKeyDictionary[Any, GraphRunner]" = weakref.WeakKeyDictionary()
"""Runners of closed batches, whose graphs are worth keeping."""


def _take_runner(model: Any, most: int) -> GraphRunner:
    """Return a runner for `most` texts: one of a closed batch, or one with an empty pool."""
    mark, idle = mark_of(model), _IDLE.pop(model, None)
    exact = not captures(model.device)
    slots = 1 + (most if exact else padded(most, TEXTS))
    # One for more texts would take their share of the tokens too.
    if idle is not None and idle.mark == mark and idle.pool.slots == slots:
        return idle
    del idle
    cache = DynamicCache(config=model.config)
    ids = torch.zeros((1, 1), dtype=torch.int64, device=model.device)
    with torch.no_grad():
        model(input_ids=ids, past_key_values=cache, use_cache=True)
    if cache.get_seq_length() != 1 or not fits_pool(cache):
        name = type(model).__name__
        raise DecodingError(f"no batches: the layers of {name} are not alike; decode one text at a time")
    with torch.inference_mode(mode=False):  # the buffers must be writable outside of it
        pool = CachePool(cache.layers[0], len(cache.layers), 0, MAX_ROWS, slots)
        return GraphRunner(model, pool, mark, exact=exact)
