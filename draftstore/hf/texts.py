"""One text being generated: its ids, the choice of its tokens, its end, its drafts."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.generation.configuration_utils import GenerationConfig

from draftstore.decoding.acceptance import Acceptance, accept
from draftstore.drafting.drafter import Drafter, Session
from draftstore.drafting.faults import DisabledSession
from draftstore.hf.checks import NO_LIMIT, depth_limit
from draftstore.hf.choosing import Chooser, Text
from draftstore.hf.prompts import PromptCandidates
from draftstore.hf.stopping import StopRules
from draftstore.hf.targets import ModelVerdict
from draftstore.trees.tree import DraftTree


class GeneratedText:
    """A text being generated.

    Attributes:
        text: its ids.
        chooser: chooses its tokens.
        stops: decides where it ends.
        over: whether it has ended.
        padding: columns of its prompt that are hidden from the model.
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
        """Prepare a text.

        Args:
            input_ids: int64 [1, length], the prompt.
            processors: as prepared by `generate`, as for the next two.
            criteria: when the text ends.
            config: configuration of this call.
            attention_mask: int [1, at least length], its last columns 0 at padding; None without padding.
            streamer: gets every token.
            random: source of random numbers; None: torch's own.
        """
        collects = bool(config.return_dict_in_generate)
        self.text = Text(input_ids)
        self.chooser = Chooser(
            self.text,
            processors,
            sample=bool(config.do_sample),
            scores=collects and bool(config.output_scores),
            logits=collects and bool(config.output_logits),
            layers=collects and bool(config.output_hidden_states),
            random=random,
        )
        self.stops = StopRules(criteria, self.text, self.chooser)
        self.over = False
        self._seen = None
        if attention_mask is not None and attention_mask.dim() == 2:
            mask = attention_mask[0, attention_mask.shape[1] - input_ids.shape[1] :]
            self._seen = mask.cpu().numpy() != 0
        self.padding = 0 if self._seen is None else int(len(self._seen) - self._seen.sum())
        self._streamer = streamer

    def ends(self, emitted: Sequence[int]) -> bool:
        """Return True if the text ends with the last emitted token, and stream that token."""
        self.over = self.stops(emitted)
        if self._streamer is not None:
            self._streamer.put(torch.tensor(emitted[-1:]))
        return self.over

    def ids(self) -> NDArray[np.int32]:
        """Return int32 [any], the text without padding."""
        ids = np.array(self.text.ids, np.int32)
        if self._seen is None:
            return ids
        prompt = ids[: len(self._seen)][self._seen]
        return np.concatenate([prompt, ids[len(self._seen) :]])

    def begin(self, verdict: ModelVerdict) -> Acceptance:
        """Emit the first token, from the outputs of the prefill."""
        accepted = accept(DraftTree.empty(), verdict.choose, self.ends)
        self.text.extend(accepted.tokens.tolist())
        return accepted

    def prompt_candidates(self, drafter: Drafter | None, vocab_size: int) -> PromptCandidates | None:
        """Return what gathers the candidates at its prompt with its padding, before that is read."""
        return PromptCandidates.of(np.array(self.text.ids), drafter, vocab_size, self._seen)

    def session(
        self,
        drafter: Drafter | None,
        verdict: ModelVerdict,
        prompt_candidates: PromptCandidates | None = None,
    ) -> Session:
        """Start its drafts, after the first token; without a drafter there are none."""
        if drafter is None:
            return DisabledSession()
        candidates = verdict.candidates()
        if prompt_candidates is not None and candidates is not None:
            candidates = prompt_candidates.rows(candidates)
        return drafter.session(self.ids(), hidden=verdict.hidden(0), candidates=candidates)

    def depth(self, model: Any, shift: int) -> Callable[[], int]:
        """Return a function to the maximum depth of a draft now, limited by the tokens still to be emitted.

        Args:
            model: model of transformers.
            shift: what is taken from the text's length for the position of its last token.
        """
        most = self.stops.max_length
        limit = depth_limit(model)

        def depth() -> int:
            length = len(self.text)
            left = NO_LIMIT if most is None else most - length - 1
            return max(0, min(left, limit(length - shift)))

        return depth


def prepare_text(
    model: Any, inputs: torch.Tensor, *, random: torch.Generator | None = None, **generate_kwargs: Any
) -> GeneratedText:
    """Prepare a text as plain `generate` would, and generate nothing."""
    found: list[GeneratedText] = []

    def prepared(
        _model: Any,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **model_kwargs: Any,
    ) -> torch.Tensor:
        mask = model_kwargs.get("attention_mask")
        found.append(
            GeneratedText(
                input_ids,
                logits_processor,
                stopping_criteria,
                generation_config,
                attention_mask=mask,
                random=random,
            )
        )
        return input_ids

    # A cache of its own is made anyway: one that grows takes no memory before it is used.
    model.generate(inputs, custom_generate=prepared, **generate_kwargs | {"cache_implementation": None})
    return found[0]
