"""Texts of a batch from the arguments of `model.generate`, which transformers prepares as for plain `generate`."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers.generation.configuration_utils import GenerationConfig
from transformers.generation.utils import GenerationMixin

from draftstore.hf.checks import check_request
from draftstore.hf.members import Member

OURS = __name__.rpartition(".")[0]
"""Where the custom functions live that get all arguments."""


def prepare_texts(
    model: Any,
    input_ids: torch.Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: GenerationConfig,
    *,
    streamer: Any = None,
    sources: Sequence[torch.Generator | None] = (None,),
    **model_kwargs: Any,
) -> list[Member]:
    """Return prepared prompts as texts, each with its source of random numbers; DecodingError as `check_request`."""
    check_request(model, generation_config, model_kwargs, len(input_ids))
    mask = model_kwargs.get("attention_mask")
    rules = logits_processor, stopping_criteria, generation_config
    return [
        Member(
            input_ids[row : row + 1],
            *rules,
            attention_mask=None if mask is None else mask[row : row + 1],
            streamer=streamer,
            random=random,
        )
        for row, random in zip(range(len(input_ids)), sources, strict=True)
    ]


def prepare_text(
    model: Any, inputs: torch.Tensor, *, random: torch.Generator | None = None, **arguments: Any
) -> Member:
    """Prepare one text for a batch as plain `generate` would, without generating anything."""
    found: list[Member] = []

    def prepared(*given: Any, **named: Any) -> torch.Tensor:
        found.extend(prepare_texts(*given, sources=[random], **named))
        return inputs

    model.generate(inputs, custom_generate=prepared, **arguments)
    return found[0]


def _handing_over(usual: Any) -> Any:
    """Return transformers' choice of the arguments of a custom function, with those it drops for functions of ours."""

    def extract(
        self: Any, function: Any, kwargs: dict[str, Any], synced_gpus: Any, assistant: Any, streamer: Any
    ) -> Any:
        dropped = {"tokenizer": kwargs.get("tokenizer"), "assistant_model": assistant, "streamer": streamer}
        found = usual(self, function, kwargs, synced_gpus, assistant, streamer)
        whole = getattr(function, "func", function)  # of a partial one
        if str(getattr(whole, "__module__", "")).startswith(OURS):
            found |= {name: value for name, value in dropped.items() if value is not None}
        return found

    return extract


# Without these, stop strings fail for want of the tokenizer, and whoever reads from the streamer waits for ever.
_CHOICE = "_extract_generation_mode_kwargs"
setattr(GenerationMixin, _CHOICE, _handing_over(getattr(GenerationMixin, _CHOICE)))
