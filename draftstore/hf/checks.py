"""Checks of what can be decoded with drafts, and whether a model supports trees or only chains."""

from collections.abc import Callable, Mapping
from typing import Any

from transformers.cache_utils import Cache, get_layer_types_and_kwargs
from transformers.generation.configuration_utils import GenerationConfig, GenerationMode

from draftstore.errors import DecodingError
from draftstore.hf.caches import RollbackCache, can_go_back

TREE_ATTENTION = ("sdpa", "eager", "flex_attention")
"""Attention implementations that accept a custom mask."""
KNOWN = frozenset(
    {
        "attention_mask",
        "inputs_embeds",
        "logits_to_keep",
        "output_attentions",
        "output_hidden_states",
        "past_key_values",
        "position_ids",
        "use_cache",
    }
)
"""Model arguments that passes over trees support."""
MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
PLAIN = "use plain generate, without custom_generate"


def check_request(
    model: Any,
    config: GenerationConfig,
    model_kwargs: Mapping[str, Any],
    *,
    drafting: bool,
) -> None:
    """Refuse unsupported requests before any computation.

    Args:
        model: model of transformers.
        config: generation configuration.
        model_kwargs: arguments of the model.
        drafting: whether there is a drafter.

    Raises:
        DecodingError: see `speculative_generate`.
    """
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise DecodingError(f"{name} has an encoder, expected a decoder-only model: {PLAIN}")
    if (config.num_beams or 1) > 1:
        raise DecodingError(f"num_beams is {config.num_beams}, expected 1: drafts follow one text; {PLAIN}")
    if (mode := config.get_generation_mode()) not in MODES:
        raise DecodingError(
            f"the arguments ask for {mode.value}, expected greedy search or sampling: leave out what asks for it, "
            f"or {PLAIN}"
        )
    if config.output_attentions:
        raise DecodingError(
            "output_attentions is set, and the attentions of a pass over a draft are not those of plain decoding: "
            f"leave it out, or {PLAIN}"
        )
    if model._is_stateful or _linear_layers(model):
        raise DecodingError(
            f"{name} has layers of linear attention, whose state cannot take back rejected tokens: {PLAIN}"
        )
    _check_cache(name, model_kwargs, drafting)


def _check_cache(name: str, model_kwargs: Mapping[str, Any], drafting: bool) -> None:
    """Refuse decoding without a cache, or with drafts over a cache without rollback."""
    cache = model_kwargs.get("past_key_values")
    if not model_kwargs.get("use_cache"):
        raise DecodingError(
            f"use_cache is off, as an argument or in the settings of {name}, and drafts need the cache: "
            "pass use_cache=True"
        )
    if cache is None:
        raise DecodingError(f"{name} takes no cache of transformers, which drafts need: {PLAIN}")
    if not isinstance(cache, Cache):
        raise DecodingError(
            f"past_key_values is of {type(cache).__name__}, expected a cache of transformers, like DynamicCache"
        )
    if drafting and not can_go_back(cache):
        kinds = ", ".join(sorted({type(layer).__name__ for layer in cache.layers}))
        raise DecodingError(
            f"a {type(cache).__name__} of {kinds} cannot take back rejected tokens: use a DynamicCache "
            "(cache_implementation='dynamic'), or decode without a drafter"
        )


def _linear_layers(model: Any) -> bool:
    """Return True if a model has layers with a recurrent state instead of keys and values."""
    types = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ()
    return any(kind in ("linear_attention", "conv", "hybrid", "hybrid_sliding", "mamba") for kind in types)


def takes_trees(model: Any, memory: RollbackCache, model_kwargs: Mapping[str, Any]) -> bool:
    """Return True if a model can verify trees; otherwise only chains."""
    config = model.config.get_text_config(decoder=True)
    positions = model_kwargs.get("position_ids")
    return bool(
        memory.trees
        and model._supports_attention_backend
        and config._attn_implementation in TREE_ATTENTION
        and sees_whole_text(config)
        and positions is not None
        and positions.dim() == 2
        and all(key in KNOWN or value is None for key, value in model_kwargs.items())
    )


def sees_whole_text(config: Any) -> bool:
    """Return True if every layer attends to the whole text before a token, and to nothing behind it."""
    return getattr(config, "is_causal", True) and set(get_layer_types_and_kwargs(config)[0]) == {
        "full_attention"
    }


def depth_limit(model: Any) -> Callable[[int], int]:
    """Return a function from the position of a text's last token to the maximum depth of a draft there.

    Drafts end at the model's last position. In models whose rotary embedding changes for the whole text beyond a
    certain length (`longrope`), no pass may have rows on both sides of it.
    """
    config = model.config.get_text_config(decoder=True)
    end = getattr(config, "max_position_embeddings", None)
    turns = _turning_points(config)

    def limit(position: int) -> int:
        limits = [turn - 1 - position for turn in turns if position < turn]
        if end is not None:
            limits.append(max(0, end - 1 - position))
        return min(limits, default=NO_LIMIT)

    return limit


NO_LIMIT = 2**31


def _turning_points(config: Any) -> list[int]:
    """Return the lengths at which the rotary embedding of all positions changes."""
    key = "original_max_position_embeddings"
    return [
        int(rope[key])
        for rope in rope_settings(config)
        if rope.get("rope_type") == "longrope" and rope.get(key)
    ]


def rope_settings(config: Any) -> list[dict[str, Any]]:
    """Return a model's rotary embedding settings: one dictionary, or one per layer type."""
    rope = getattr(config, "rope_parameters", None) or {}
    return [value for value in rope.values() if isinstance(value, dict)] or [rope]
