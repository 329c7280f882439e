"""Checks of whether models and requests can be decoded with drafts, and the maximum depth of a draft."""

from collections.abc import Callable, Mapping
from typing import Any

from transformers.cache_utils import Cache
from transformers.generation.configuration_utils import GenerationConfig, GenerationMode
from transformers.generation.utils import GenerationMixin

from draftstore.errors import DecodingError
from draftstore.hf.attention import CHUNKED, FULL, SLIDING, views_of
from draftstore.hf.loading import positions_of

ATTENTION = ("sdpa", "eager")
"""Attention implementations that accept a custom mask."""
MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
PLAIN = "call model.generate without custom_generate"
IGNORED = frozenset(
    {"attention_mask", "logits_to_keep", "past_key_values", "position_ids", "tokenizer", "use_cache"}
)
"""Arguments that `generate` prepares and that passes over drafts set themselves, or that only it needs."""
TYPES = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")
"""Arguments that tell a model of text and images which tokens are text: those of type 0."""
SELECTED = ("index_topk", "index_topk_blocks", "keep_window_size")
"""Settings of sparse attention: the number of keys that a token attends to."""
NO_LIMIT = 2**31


def unsupported_reason(model: Any) -> str | None:
    """Return why models of this kind are never decoded with drafts; None if only test passes can tell."""
    config = model.config.get_text_config(decoder=True)
    positions = positions_of(model) or NO_LIMIT
    if model.config.is_encoder_decoder:
        return "has an encoder"
    if config._attn_implementation not in ATTENTION:
        return f"uses the attention {config._attn_implementation!r}: load it with 'sdpa' or 'eager'"
    if model._is_stateful or not set(views_of(config)) <= {FULL, SLIDING, CHUNKED}:
        return "has linear attention layers or another state that cannot be rolled back"
    if not getattr(config, "is_causal", True):
        return "attends to later tokens"
    if config.model_type == "moshi" and SLIDING in views_of(config):
        return "ignores its sliding window during prefill"
    for name in SELECTED:
        if (getattr(config, name, None) or positions) < positions:
            return f"attends only to the keys with the highest scores ({name})"
    return None


def takes_single_texts(model: Any) -> bool:
    """Return True if a model takes one text at a time: its positions depend on the longest of a batch."""
    return any(rope.get("rope_type") in ("dynamic", "longrope") for rope in _rope_settings(model))


def check_request(model: Any, config: GenerationConfig, model_kwargs: Mapping[str, Any], texts: int) -> None:
    """Raise a DecodingError for arguments of `generate` that drafts do not support for this number of texts."""
    if (config.num_beams or 1) > 1:
        raise DecodingError(f"num_beams is {config.num_beams}, expected 1: drafts follow one text; {PLAIN}")
    if (mode := config.get_generation_mode()) not in MODES:
        raise DecodingError(
            f"the arguments select {mode.value}, expected greedy search or sampling: change them, or {PLAIN}"
        )
    returned = config.return_dict_in_generate
    asked = [name for name in ("output_scores", "output_logits") if texts > 1 and getattr(config, name)]
    asked += [name for name in ("output_attentions", "output_hidden_states") if getattr(config, name)]
    asked = asked if returned else []
    asked += [
        name for name, value in model_kwargs.items() if name not in asked and _counts(model, name, value)
    ]
    if asked:
        raise DecodingError(f"{' and '.join(asked)} with drafts is not supported: remove it, or {PLAIN}")
    if (mask := model_kwargs.get("attention_mask")) is not None and not mask[..., -1].all():
        raise DecodingError(f"padding after a prompt: pad on the left, or {PLAIN}")
    if _moved(model_kwargs):
        raise DecodingError(f"position_ids are not the default ones: remove them, or {PLAIN}")
    cache = model_kwargs.get("past_key_values")
    if isinstance(cache, Cache) and cache.get_seq_length():
        raise DecodingError(
            "past_key_values already holds a text, but drafts use their own cache: pass the whole text, or "
            + PLAIN
        )


def _counts(model: Any, name: str, value: Any) -> bool:
    """Return True if an argument of the model has an effect that drafts do not have: judged by its value."""
    if name in TYPES and "image" in model.input_modalities:
        return value is not None and bool(value.any())
    if isinstance(value, Mapping):  # such as the encoded images of a prompt without one
        return any(each is not None for each in value.values())
    # What else a pass returns is collected only if the configuration says so: see above.
    return value is not None and name not in IGNORED and not name.startswith("output_")


def _moved(model_kwargs: Mapping[str, Any]) -> bool:
    """Return True if positions, [..., texts, length], differ from the default ones, which count unmasked tokens."""
    positions, mask = model_kwargs.get("position_ids"), model_kwargs.get("attention_mask")
    if positions is None:
        return False
    seen = positions.new_ones(positions.shape[-2:]) if mask is None else mask[:, -positions.shape[-1] :]
    return bool(((positions != seen.cumsum(-1) - 1) & (seen != 0)).any())


def depth_limit(model: Any) -> Callable[[int], int]:
    """Return a function from the position of a text's last token to the maximum depth of a draft there.

    Drafts end at the model's last position, and no pass may span a turning point.
    """
    end, turns = positions_of(model) or NO_LIMIT, _turning_points(model)

    if not turns:
        return lambda position: max(0, end - 1 - position)

    def limit(position: int) -> int:
        return min(
            max(0, end - 1 - position), *(turn - 1 - position for turn in turns if position < turn), NO_LIMIT
        )

    return limit


def recompute_length(model: Any) -> int | None:
    """Return the length at which plain `generate` recomputes the cache, as for Phi 3; None for most models."""
    usual = type(model).prepare_inputs_for_generation is GenerationMixin.prepare_inputs_for_generation
    return None if usual else min(_turning_points(model), default=None)


def _turning_points(model: Any) -> list[int]:
    """Return the lengths at which the rotary embedding changes for the whole text (`longrope`)."""
    key = "original_max_position_embeddings"
    longropes = [each for each in _rope_settings(model) if each.get("rope_type") == "longrope"]
    return [int(each[key]) for each in longropes if each.get(key)]


def _rope_settings(model: Any) -> list[dict[str, Any]]:
    """Return a model's rotary embedding settings: one dictionary, or one per layer type."""
    rope = getattr(model.config.get_text_config(decoder=True), "rope_parameters", None) or {}
    return [value for value in rope.values() if isinstance(value, dict)] or [rope]


def decodes_otherwise(model: Any) -> bool:
    """Return whether plain `generate` computes a model's experts in another way once the prompt is read."""
    known = getattr(model, "get_experts_implementation", None)
    return known is None or (model.device.type != "cpu" and "grouped_mm" in known().values())


def vocab_size(model: Any) -> int:
    """Return the size of a model's vocabulary."""
    return int(model.config.get_text_config(decoder=True).vocab_size)
