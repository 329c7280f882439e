"""Generation with drafts: the output of plain `generate`, in fewer forward passes.

    from draftstore.hf import generate, speculative_generate

    generate(model, **inputs, drafter=drafter, max_new_tokens=200)
    model.generate(**inputs, custom_generate=speculative_generate, drafter=drafter, max_new_tokens=200)

The first form is short for the second.
"""

from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

import torch
from transformers.generation.configuration_utils import GenerationConfig
from transformers.generation.logits_process import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from transformers.generation.utils import GenerateDecoderOnlyOutput

from draftstore.decoding.budget import Fixed, Planner
from draftstore.decoding.loop import Step
from draftstore.drafting.drafter import Drafter
from draftstore.drafting.request import RequestDrafter
from draftstore.errors import DecodingError
from draftstore.hf.batches import MAX_TEXTS, Batch, tokens_for
from draftstore.hf.exactness import PROMPT, Exactness, examine, random_tokens, require_exact
from draftstore.hf.loading import LoadedModel, positions_of
from draftstore.hf.members import Member, prepare_texts
from draftstore.trees.frontier import BUDGET

OF_THE_WHOLE = (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
"""Logits processors that use a text's index, or keep state for all texts: here they see one text at a time."""


def speculative_generate(
    model: Any,
    input_ids: torch.Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: GenerationConfig,
    *,
    drafter: Drafter | None = None,
    budget: int = BUDGET,
    planner: Planner | None = None,
    min_prob: float = 0.0,
    streamer: Any = None,
    on_step: Callable[[Step], None] | None = None,
    seeds: Sequence[int] | None = None,
    **model_kwargs: Any,
) -> torch.Tensor | GenerateDecoderOnlyOutput:
    """Generate with drafts, as `model.generate(..., custom_generate=speculative_generate, drafter=...)`.

    The output is that of plain `generate`, greedy or sampled with the same seed, except for rounding, which differs
    between passes over one row and over many.

    Args:
        model: a causal language model of transformers 5.
        input_ids: int64 [texts, length], the prompts, padded on the left; `num_return_sequences` repeats each.
        logits_processor: this and the next two as prepared by `generate`.
        stopping_criteria: criteria that end a text.
        generation_config: configuration of this call.
        drafter: proposes drafts; None decodes without drafts.
        budget: maximum nodes of a draft; ignored with a planner.
        planner: chooses how much of a draft to verify.
        min_prob: minimum probability of a drafted node.
        streamer: gets the prompt, from `generate`, and every token of a single text.
        on_step: called for every text after its prefill (a step with an empty tree) and after every pass. If it raises,
            generation ends.
        seeds: one for each text; a sampled text is the one that plain `generate` returns for its prompt alone after
            `torch.manual_seed(seed)`. By default, a single text uses torch's random numbers, and several are seeded
            from them.
        model_kwargs: arguments of the model, as prepared by `generate`; their cache stays empty.

    Returns:
        int64 [texts, length], prompts and outputs, or with `return_dict_in_generate` the result of plain `generate`
        without the cache. Shorter texts are padded with the pad id.

    Raises:
        DecodingError: unsupported generation: beams, an assistant, a cache that holds a text, inputs other than ids,
            attentions or hidden states as an output; a model that does not support drafts, see
            `draftstore.hf.exactness`; several texts with a streamer, scores or logits.
    """
    require_exact(model)
    texts = len(input_ids)
    if texts > 1:
        _check_texts(logits_processor, streamer)
    planner = (planner or Fixed(budget)) if drafter is not None else Fixed(0)
    prepared = prepare_texts(
        model,
        input_ids,
        logits_processor,
        stopping_criteria,
        generation_config,
        streamer=streamer,
        sources=_sources(seeds, texts, generation_config, input_ids.device),
        **model_kwargs,
    )
    members = [member.draft(drafter, planner, min_prob) for member in prepared]
    with closing(batch_for(model, members)) as batch:
        decode_all(batch, members, on_step or (lambda _: None))
    if streamer is not None:
        streamer.end()
    return _result(members, generation_config)


def decode_all(batch: Batch, members: Sequence[Member], on_step: Callable[[Step], None]) -> None:
    """Decode texts to their ends, and number their steps; the error of a text that failed is raised."""
    numbers = {member: number for number, member in enumerate(members)}
    for member in members:
        batch.join(member)
    while len(batch):
        for member, result in batch.step():
            if isinstance(result, Exception):
                raise result
            on_step(result._replace(text=numbers[member]))


def _check_texts(processors: Any, streamer: Any) -> None:
    asked = ["streamer"] if streamer is not None else []
    asked += [type(each).__name__ for each in processors if isinstance(each, OF_THE_WHOLE)]
    if asked:
        raise DecodingError(f"{' and '.join(asked)} for several texts: call generate once for each text")


def _sources(
    seeds: Sequence[int] | None, texts: int, config: GenerationConfig, device: torch.device
) -> Sequence[torch.Generator | None]:
    """Return a random number generator for each text; None is torch's default."""
    if seeds is None and (texts == 1 or not config.do_sample):
        return [None] * texts
    if seeds is None:
        seeds = torch.randint(2**62, (texts,)).tolist()
    if len(seeds) != texts:
        raise DecodingError(f"{len(seeds)} seeds for {texts} texts: give one for each")
    return [seeded(seed, device) for seed in seeds]


def seeded(seed: int | None, device: torch.device) -> torch.Generator:
    """Return a generator of the numbers that follow `torch.manual_seed(seed)`; None: a random seed."""
    source = torch.Generator(device)
    if seed is None:
        source.seed()
    else:
        source.manual_seed(seed)
    return source


def batch_for(model: Any, members: Sequence[Member]) -> Batch:
    """Return a batch with room for the maximum lengths of these texts."""
    most = min(len(members), MAX_TEXTS)
    lengths = [member.max_length or positions_of(model) or 0 for member in members]
    return Batch(model, most=most, tokens=tokens_for(most, max(lengths)) if all(lengths) else None)


def _result(members: Sequence[Member], config: GenerationConfig) -> torch.Tensor | GenerateDecoderOnlyOutput:
    # Without a pad id, plain `generate` pads with the first id that ends a text.
    pad: Any = config._pad_token_tensor if config.pad_token_id is None else config.pad_token_id
    texts = [member.text.tensor()[0] for member in members]
    padding = 0 if pad is None else int(pad)
    sequences = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=padding)
    if not config.return_dict_in_generate:
        return sequences
    (text, *_) = members
    collected: dict[str, Any] = {"sequences": sequences, "scores": text.scores, "logits": text.logits}
    return GenerateDecoderOnlyOutput(**collected)


def generate(
    model: Any, inputs: torch.Tensor | None = None, **arguments: Any
) -> torch.Tensor | GenerateDecoderOnlyOutput:
    """Call `model.generate` with drafts.

    Args:
        inputs: int64 [texts, length], the prompts; or `input_ids=`.
        arguments: `drafter` and the others of `speculative_generate`, and those of `model.generate`.

    Raises:
        DecodingError: see `speculative_generate`.
        ValueError: errors of `model.generate`, such as stop strings without a `tokenizer=`.
    """
    output: torch.Tensor | GenerateDecoderOnlyOutput = model.generate(
        inputs, custom_generate=speculative_generate, **arguments
    )
    return output


def check_model(loaded: LoadedModel) -> Exactness:
    """Check a model, and call `generate` with its own settings as users do: what either refuses is the fault."""
    found = examine(loaded.model)
    if not found.fault:
        prompt = torch.from_numpy(random_tokens(loaded.model))[None, :PROMPT].to(loaded.model.device)
        options: dict[str, Any] = {
            "drafter": RequestDrafter(loaded.vocab_size),
            "tokenizer": loaded.tokenizer,
        }
        try:
            generate(
                loaded.model, prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=4, **options
            )
        except Exception as error:  # noqa: BLE001 (a model's code and settings may raise anything)
            return found._replace(fault=f"is refused with its own settings: {error}")
    return found
