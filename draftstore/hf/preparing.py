"""Texts of a batch from the arguments of `model.generate`, which transformers prepares as for plain `generate`."""

import copy
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from transformers.generation.configuration_utils import GenerationConfig
from transformers.generation.utils import GenerationMixin

from draftstore.hf.checks import check_request
from draftstore.hf.members import Member

DROPPED = ("tokenizer", "assistant_model", "streamer")
_CHOICE = "_extract_generation_mode_kwargs"
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
    return [
        Member(
            input_ids[row : row + 1],
            _of_row(logits_processor, row),
            stopping_criteria,
            generation_config,
            attention_mask=None if mask is None else mask[row : row + 1],
            streamer=streamer,
            random=random,
        )
        for row, random in zip(range(len(input_ids)), sources, strict=True)
    ]


def _of_row(processors: Any, row: int) -> Any:
    """Return logits processors with the length of one text's own padding, of those for all texts."""
    found = copy.copy(processors)
    for place, each in enumerate(processors):
        if isinstance(ignored := getattr(each, "prompt_ignore_length", None), torch.Tensor) and ignored.ndim:
            found[place] = copy.copy(each)
            found[place].prompt_ignore_length = ignored[row : row + 1]
    return found


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
    signature = inspect.signature(usual)

    def extract(*positional: Any, **named: Any) -> Any:
        given = signature.bind(*positional, **named).arguments
        given["tokenizer"] = given.get("kwargs", {}).get("tokenizer")
        found, function = usual(*positional, **named), given.get("custom_generate")
        whole = getattr(function, "func", function)  # of a partial one
        if str(getattr(whole, "__module__", "")).startswith(OURS):
            found |= {name: given[name] for name in DROPPED if given.get(name) is not None}
        return found

    return extract


# transformers passes a streamer to its own functions alone, so that whoever reads from it would wait for ever.
if hasattr(GenerationMixin, _CHOICE):
    setattr(GenerationMixin, _CHOICE, _handing_over(getattr(GenerationMixin, _CHOICE)))
