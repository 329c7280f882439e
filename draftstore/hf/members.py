"""One text of a batch: its prompt, token choice, stopping criteria and drafts."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.generation.configuration_utils import GenerationConfig

from draftstore.decoding.acceptance import Acceptance, accept, check_tree
from draftstore.decoding.budget import Planner
from draftstore.decoding.loop import Text
from draftstore.drafting.drafter import Drafter
from draftstore.drafting.slots import Slots, SlotSession, start
from draftstore.errors import DecodingError
from draftstore.hf.checks import NO_LIMIT, depth_limit, vocab_size
from draftstore.hf.choosing import Chooser, Ids, StopRules
from draftstore.hf.passes import Rows, Wants
from draftstore.recycling.prompts import PromptCandidates
from draftstore.trees.tree import DraftTree


class Member(Text):
    """A text of a batch; its drafts respect the limits of pool, positions and text.

    Attributes:
        text: its ids, with the padding of the prompt.
        chooser: chooses its tokens.
        prompt: int64 [any], its prompt without padding.
        past: number of its tokens in the pool.
        wants: outputs needed from its passes.
        max_length: maximum tokens, including prompt and padding; None if there is no limit.
    """

    def __init__(
        self,
        input_ids: torch.Tensor,
        processors: Any,
        criteria: Any,
        config: GenerationConfig,
        *,
        attention_mask: torch.Tensor | None = None,
        streamer: Any = None,
        random: torch.Generator | None = None,
    ) -> None:
        """Prepare a text; `draft` configures its drafts.

        Args:
            input_ids: int64 [1, length], the prompt; this and the next three as prepared by `generate`.
            processors: logits processors.
            criteria: stopping criteria.
            config: configuration of this call.
            attention_mask: int [1, length], 0 at padding; None without padding.
            streamer: gets every token.
            random: random number generator; None: torch's default.
        """
        collects = bool(config.return_dict_in_generate)
        self.text = Ids(input_ids)
        self.chooser = Chooser(
            self.text,
            processors,
            sample=bool(config.do_sample),
            scores=collects and bool(config.output_scores),
            logits=collects and bool(config.output_logits),
            random=random,
        )
        self.prompt = np.array(self.text.ids, np.int64)
        if attention_mask is not None and attention_mask.dim() == 2:
            self.prompt = self.prompt[attention_mask[0, -len(self.prompt) :].cpu().numpy() != 0]
        self.past = 0
        self._stops = StopRules(criteria, self.text, self.chooser)
        self.max_length = self._stops.max_length
        self._streamer = streamer
        self._drafter: Drafter | None = None
        self._prompt_candidates: PromptCandidates | None = None

    def draft(self, drafter: Drafter | None, planner: Planner, min_prob: float = 0.0) -> "Member":
        """Configure drafting, and return the member.

        Args:
            drafter: proposes drafts; None decodes without drafts.
            planner: chooses how much of a draft to verify; it is copied.
            min_prob: minimum probability of a drafted node.
        """
        self._drafter, self.planner, self.min_prob = drafter, copy.copy(planner), min_prob
        return self

    def ends(self, emitted: Sequence[int]) -> bool:
        """Return True if the text ends with the last emitted token, and stream that token."""
        self.over = self._stops(emitted)
        if self._streamer is not None:
            self._streamer.put(torch.tensor(emitted[-1:]))
        return self.over

    @property
    def gathers(self) -> bool:
        """Whether its drafter needs candidates of the whole prompt."""
        return bool(getattr(self._drafter, "needs_candidates", False))

    def prompt_candidates(self, vocab_size: int) -> PromptCandidates | None:
        """Return the object that gathers candidates from the prompt; the same one until the prompt is read."""
        if self.past == 0 and self.gathers:
            self._prompt_candidates = PromptCandidates(self.prompt, vocab_size)
        return self._prompt_candidates

    @property
    def first_wants(self) -> Wants:
        """The outputs needed at the end of the prompt."""
        drafting = self._drafter is not None
        return Wants(self.chooser.greedy, drafting, drafting)

    def begin(self, rows: Rows, model: Any, room: Callable[[], int], slots: Slots) -> Acceptance:
        """Emit the first token and, unless that ends the text, start its drafts.

        Args:
            rows: the outputs at the end of the prompt.
            model: model of transformers.
            room: function that returns the maximum nodes of a draft.
            slots: those of the batch.
        """
        verdict = ModelVerdict(rows, self.chooser, self.first_wants)
        accepted = accept(DraftTree.empty(), verdict.choose, self.ends)
        self.text.extend(accepted.tokens)
        if not self.over:
            self.session = self._session(verdict, slots)
            self.planner.begin()
            self.wants = Wants(self.chooser.greedy, self.session.needs_candidates, self.session.needs_hidden)
            self._room, self._vocab_size, self._depth_limit = room, vocab_size(model), depth_limit(model)
        self._prompt_candidates = None
        return accepted

    def _session(self, verdict: "ModelVerdict", slots: Slots) -> SlotSession:
        candidates = verdict.candidates()
        if self._prompt_candidates is not None and candidates is not None:
            candidates = self._prompt_candidates.rows(candidates)
        ids = np.append(self.prompt, self.text.ids[-1]).astype(np.int32)
        return start(self._drafter, ids, slots=slots, hidden=verdict.hidden(0), candidates=candidates)

    def keep(self, accepted: Acceptance | None) -> list[int]:
        """Append accepted tokens; return the rows of the pass to keep."""
        if accepted is None:
            return []
        self.text.extend(accepted.tokens)
        self.past += len(accepted.tokens)
        return [0, *(node + 1 for node in accepted.path)]

    def _depth(self) -> int:
        """Return the maximum depth of a draft now: nodes that could not be emitted are not verified."""
        most = self.max_length
        left = NO_LIMIT if most is None else most - len(self.text) - 1
        return max(0, min(left, self._depth_limit(self.past)))

    def budget(self) -> int:
        """Return the maximum nodes of a draft now."""
        return 0 if self._depth() == 0 else max(0, min(self._room(), super().budget()))

    def cut(self, tree: DraftTree) -> DraftTree:
        """Return a draft within the limits; DecodingError if a token is not in the model's vocabulary."""
        if len(tree) == 0:
            return tree
        check_tree(tree)  # kernels and masks follow its parents
        if not 0 <= int(tree.tokens.min()) <= int(tree.tokens.max()) < self._vocab_size:
            wrong = next(token for token in tree.tokens.tolist() if not 0 <= token < self._vocab_size)
            raise DecodingError(
                f"the drafter proposes token {wrong}, expected an id of the model's vocabulary, below "
                f"{self._vocab_size:,}: use a store that was built with the model's own tokenizer"
            )
        tree = tree.down_to(self._depth())
        return tree if len(tree) <= self._room() else tree.prefix(self._room())


class ModelVerdict:
    """The model's outputs for a text's tree: a `draftstore.decoding.loop.Verdict`."""

    def __init__(self, rows: Rows, chooser: Chooser, wants: Wants) -> None:
        """Wrap the outputs of a pass."""
        self._rows, self._chooser, self._wants = rows, chooser, wants
        self._best: list[int] | None = None

    def choose(self, row: int, emitted: Sequence[int]) -> int:
        """Return the token that the model emits at a row."""
        if not self._chooser.greedy:
            return self._chooser.choose(self._rows.logits(row), emitted)
        if self._best is None:
            self._best = self._rows.best()
        return self._best[row]

    def candidates(self) -> NDArray[np.int32] | None:
        """Return int32 [n + 1, 8], the most likely tokens at each row."""
        return self._rows.candidates() if self._wants.candidates else None

    def hidden(self, row: int) -> NDArray[np.float16] | None:
        """Return float16 [d], the last hidden state at a row."""
        return self._rows.hidden(row) if self._wants.hidden else None
