"""Generation of several texts in one call: the rows of a batch, as plain `generate` takes and returns them."""

from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

import torch
from transformers.generation.configuration_utils import GenerationConfig
from transformers.generation.logits_process import (
    PrefixConstrainedLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from transformers.generation.utils import GenerateDecoderOnlyOutput

from draftstore.decoding.loop import Step
from draftstore.errors import DecodingError
from draftstore.hf.batches import MAX_TEXTS, Batch, tokens_for
from draftstore.hf.checks import KNOWN
from draftstore.hf.loading import positions_of
from draftstore.hf.members import Member
from draftstore.hf.texts import GeneratedText

APART = "call generate once for each text"
OF_THE_WHOLE = (
    PrefixConstrainedLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
"""Logits processors that know the number of a text, or keep a state for all texts: here they see one at a time."""


def check_batch(
    config: GenerationConfig, model_kwargs: dict[str, Any], processors: Any, streamer: Any, forward: Any
) -> None:
    """Refuse what several texts cannot be asked for together."""
    asked = [
        name
        for name in ("output_scores", "output_logits", "output_hidden_states")
        if config.return_dict_in_generate and getattr(config, name)
    ]
    asked += [name for name, value in (("streamer", streamer), ("forward", forward)) if value is not None]
    asked += [name for name, value in model_kwargs.items() if value is not None and name not in KNOWN]
    if model_kwargs.get("inputs_embeds") is not None:
        asked.append("inputs_embeds")
    if _moved(model_kwargs.get("position_ids"), model_kwargs.get("attention_mask")):
        asked.append("position_ids of your own")
    asked += [type(each).__name__ for each in processors if isinstance(each, OF_THE_WHOLE)]
    if asked:
        raise DecodingError(f"{' and '.join(asked)} for several texts: {APART}")
    if model_kwargs["past_key_values"].get_seq_length():
        raise DecodingError(f"a cache that holds texts already, for several texts: {APART}")


def _moved(positions: torch.Tensor | None, mask: torch.Tensor | None) -> bool:
    """Return True if positions are others than the numbers of the tokens that a mask shows."""
    if positions is None:
        return False
    seen = torch.ones_like(positions) if mask is None else mask[:, -positions.shape[-1] :]
    return bool(((positions != seen.cumsum(-1) - 1) & (seen != 0)).any())


def generate_texts(
    model: Any,
    input_ids: torch.Tensor,
    processors: Any,
    criteria: Any,
    config: GenerationConfig,
    attention_mask: torch.Tensor | None,
    member_of: Callable[[GeneratedText], Member],
    on_step: Callable[[Step], None] | None,
    seeds: Sequence[int] | None,
) -> torch.Tensor | GenerateDecoderOnlyOutput:
    """Generate several texts, int64 [texts, length], padded behind their ends; arguments as `speculative_generate`."""
    if seeds is not None and len(seeds) != len(input_ids):
        raise DecodingError(f"{len(seeds)} seeds for {len(input_ids)} texts: give one for each")
    if seeds is None:
        seeds = torch.randint(2**62, (len(input_ids),)).tolist() if config.do_sample else [0] * len(input_ids)
    texts = [
        GeneratedText(
            input_ids[row : row + 1],
            processors,
            criteria,
            config,
            attention_mask=None if attention_mask is None else attention_mask[row : row + 1],
            random=seeded(seeds[row], input_ids.device),
        )
        for row in range(len(input_ids))
    ]
    with closing(_batch(model, texts)) as batch:
        members = {member_of(text): row for row, text in enumerate(texts)}
        for member in members:
            batch.join(member)
        while len(batch):
            for member, step, error in batch.step():
                if step is None:
                    raise error or DecodingError("a text failed")
                if on_step is not None:
                    on_step(step._replace(text=members[member]))
    # Without a pad id of its own, plain generate fills up with the first id that ends a text.
    pad = config._pad_token_tensor if config.pad_token_id is None else config.pad_token_id
    sequences = _padded([text.text.tensor()[0] for text in texts], pad)
    collected: dict[str, Any] = {"sequences": sequences}
    return GenerateDecoderOnlyOutput(**collected) if config.return_dict_in_generate else sequences


def _batch(model: Any, texts: Sequence[GeneratedText]) -> Batch:
    """Return a batch with room for texts as long as these may become."""
    most = min(len(texts), MAX_TEXTS)
    lengths = [text.stops.max_length or positions_of(model) or 0 for text in texts]
    return Batch(model, most=most, tokens=tokens_for(most, max(lengths)) if all(lengths) else None)


def seeded(seed: int | None, device: torch.device) -> torch.Generator:
    """Return a source of random numbers: those that torch draws after `torch.manual_seed(seed)`; None: any."""
    source = torch.Generator(device)
    if seed is None:
        source.seed()
    else:
        source.manual_seed(seed)
    return source


def _padded(texts: Sequence[torch.Tensor], pad: Any) -> torch.Tensor:
    """Return texts side by side, filled up with the pad id, or 0 if there is none."""
    value = 0 if pad is None else int(pad)
    return torch.nn.utils.rnn.pad_sequence(list(texts), batch_first=True, padding_value=value)
