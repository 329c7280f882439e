"""Requests as texts for a batch: the only place that maps them to arguments of `generate` and logits processors."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from transformers import LogitsProcessor, LogitsProcessorList

from draftstore.decoding.budget import Planner, capped
from draftstore.decoding.grammars import Grammar
from draftstore.drafting.drafter import Drafter
from draftstore.errors import ProbabilityError
from draftstore.hf.generation import seeded
from draftstore.hf.loading import LoadedModel
from draftstore.hf.members import Member, prepare_text
from draftstore.hf.requests import GREEDY, GenerationRequest, Sampling

ONE_TEXT: dict[str, Any] = {
    "num_beams": 1, "num_return_sequences": 1, "constraints": None, "force_words_ids": None, "penalty_alpha": None,
    "dola_layers": None, "prompt_lookup_num_tokens": None, "assistant_early_exit": None, "use_mtp": False,
    "token_healing": False, "return_dict_in_generate": False,
}  # fmt: skip
"""What a request asks for, whatever the model's own settings say: one text after its prompt, token by token."""


def batch_member(
    loaded: LoadedModel,
    request: GenerationRequest,
    *,
    drafter: Drafter | None,
    planner: Planner,
    min_prob: float = 0.0,
) -> Member:
    """Return the answer to a request as a text for a batch; ValueError if `generate` rejects an argument."""
    device = loaded.model.device
    prompt = torch.from_numpy(request.prompt.astype(np.int64))[None].to(device)
    member = prepare_text(
        loaded.model,
        prompt,
        attention_mask=torch.ones_like(prompt),
        tokenizer=loaded.tokenizer,  # for the model's own stop strings
        random=seeded(request.sampling.seed, device),
        **generation_arguments(loaded, request),
    )
    return member.draft(drafter, capped(planner, request.budget), min_prob)


def generation_arguments(loaded: LoadedModel, request: GenerationRequest) -> dict[str, Any]:
    """Return the arguments of `generate` for a request: stopping and sampling."""
    model: Any = loaded.model
    sampling, ends = request.sampling, request.ends(loaded.ends)
    own = model.generation_config
    arguments = {
        **{name: value for name, value in ONE_TEXT.items() if getattr(own, name, None) not in (value, None)},
        "max_new_tokens": request.max_tokens,
        "use_cache": True,  # off by default in MPT, for one
        "cache_implementation": "dynamic",  # it grows, so it takes no memory before it is used
        "eos_token_id": ends or None,
        "pad_token_id": ends[0] if ends else None,
        # The worker looks for the model's own stop strings behind these tokens.
        **({"min_new_tokens": request.min_tokens, "stop_strings": None} if request.min_tokens else {}),
        **_choices(sampling, own),
    }
    processors, size = LogitsProcessorList(), len(request.prompt)
    if sampling.presence or sampling.frequency or sampling.bias:
        penalties = Penalties(
            size, presence=sampling.presence, frequency=sampling.frequency, bias=sampling.bias
        )
        processors.append(penalties)
    if request.grammar is not None:
        processors.append(GrammarMask(request.grammar, size))
    return {**arguments, "logits_processor": processors} if processors else arguments


def _choices(sampling: Sampling, own: Any) -> dict[str, Any]:
    """Return the sampling arguments; the model's `own` settings are the defaults."""

    def setting(name: str, default: Any) -> Any:
        values = (getattr(sampling, name), getattr(own, name, None), default)
        return next((value for value in values if value is not None), None)

    chosen = {"repetition_penalty": setting("repetition_penalty", 1.0)}
    temperature, top_p = float(setting("temperature", 1.0)), float(setting("top_p", 1.0))
    if temperature < GREEDY or top_p == 0.0:
        # Otherwise transformers warns that the model's sampling settings are ignored.
        return chosen | {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    # The default of transformers is 50 tokens.
    filters = {"top_p": top_p, "top_k": setting("top_k", 0), "min_p": setting("min_p", None)}
    return chosen | {"do_sample": True, "temperature": temperature} | filters


class GrammarMask(LogitsProcessor):
    """Sets the logits of all tokens that a grammar forbids to minus infinity; for one answer."""

    def __init__(self, grammar: Grammar, prompt_tokens: int) -> None:
        self._state, self._seen = grammar.start(), prompt_tokens

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """Return the new logits, [1, vocab_size], after int64 [1, length], which extends the text of the last call.

        GrammarError if the grammar is too complex; ProbabilityError if no token remains.
        """
        self._state.extend(input_ids[0, self._seen :].tolist())
        self._seen = input_ids.shape[1]
        allowed = torch.from_numpy(self._state.allowed()).to(scores.device)
        scores = scores.masked_fill(~allowed, -torch.inf)
        if scores.max().isneginf():
            raise ProbabilityError("the model's settings ban every token that the grammar allows")
        return scores


class Penalties(LogitsProcessor):
    """OpenAI's presence and frequency penalties, for the answer only, and its logit bias."""

    def __init__(
        self,
        prompt_tokens: int,
        *,
        presence: float = 0.0,
        frequency: float = 0.0,
        bias: Mapping[int, float] | None = None,
    ) -> None:
        self._start = prompt_tokens
        self._presence = presence
        self._frequency = frequency
        self._bias_ids = torch.tensor(list(bias or {}), dtype=torch.int64)
        self._bias = torch.tensor(list((bias or {}).values()), dtype=torch.float32)

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """Return the new logits, [texts, vocab_size], after int64 [texts, length]."""
        answer = input_ids[:, self._start :].to(scores.device)
        counts = torch.zeros_like(scores).scatter_add_(1, answer, torch.ones_like(answer, dtype=scores.dtype))
        scores = scores - self._frequency * counts - self._presence * (counts > 0)
        if len(self._bias_ids):
            ids = self._bias_ids.to(scores.device)
            scores[:, ids] += self._bias.to(scores)
        return scores
