"""Generation with drafts: the output of plain `generate`, in fewer forward passes.

    from draftstore.hf import generate, speculative_generate

    generate(model, **inputs, drafter=drafter, max_new_tokens=200)
    model.generate(**inputs, custom_generate=speculative_generate, drafter=drafter, max_new_tokens=200)

The first form calls the second; `streamer=` and `stop_strings=` work only in the first, because transformers passes
neither streamer nor tokenizer to a custom function.
"""

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
from transformers.generation.stopping_criteria import StoppingCriteriaList, StopStringCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput

from draftstore.decoding.loop import Step
from draftstore.decoding.planners import Fixed, Planner
from draftstore.drafting.drafter import Drafter
from draftstore.errors import DecodingError
from draftstore.hf.batches import MAX_TEXTS, Batch, tokens_for
from draftstore.hf.checks import check_request
from draftstore.hf.exactness import require_exact
from draftstore.hf.loading import positions_of
from draftstore.hf.members import Member

OF_THE_WHOLE = (
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
    budget: int = 64,
    planner: Planner | None = None,
    min_prob: float = 0.0,
    token_streamer: Any = None,
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
        token_streamer: gets the prompt and every token of a single text, like `streamer` in plain `generate`.
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
        DecodingError: unsupported generation: beams, a cache that holds a text, inputs other than ids, attentions or
            hidden states as an output; a model that does not support drafts, see `draftstore.hf.exactness`; several
            texts with a streamer, scores or logits.
    """
    require_exact(model)
    texts = len(input_ids)
    check_request(generation_config, model_kwargs, texts)
    if texts > 1:
        _check_texts(logits_processor, token_streamer)
    planner = (planner or Fixed(budget)) if drafter is not None else Fixed(0)
    mask = model_kwargs.get("attention_mask")
    members = [
        Member(
            input_ids[row : row + 1],
            logits_processor,
            stopping_criteria,
            generation_config,
            attention_mask=None if mask is None else mask[row : row + 1],
            streamer=token_streamer,
            random=random,
        ).draft(drafter, planner, min_prob)
        for row, random in enumerate(_sources(seeds, texts, generation_config, input_ids.device))
    ]
    if token_streamer is not None:
        token_streamer.put(input_ids.cpu())
    with closing(batch_for(model, members)) as batch:
        decode_all(batch, members, on_step or (lambda _: None))
    if token_streamer is not None:
        token_streamer.end()
    return _result(members, generation_config)


def decode_all(batch: Batch, members: Sequence[Member], on_step: Callable[[Step], None]) -> None:
    """Decode texts to their ends, and number their steps.

    Raises:
        Exception: the error of a text that failed.
    """
    numbers = {member: number for number, member in enumerate(members)}
    for member in members:
        batch.join(member)
    while len(batch):
        for member, step, error in batch.step():
            if step is None:
                raise error or DecodingError("a text failed")
            on_step(step._replace(text=numbers[member]))


def _check_texts(processors: Any, streamer: Any) -> None:
    """Raise a DecodingError for arguments that are not supported for several texts together."""
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
    """Return the result in the format of plain `generate`."""
    # Without a pad id, plain `generate` pads with the first id that ends a text.
    pad: Any = config._pad_token_tensor if config.pad_token_id is None else config.pad_token_id
    texts = [member.text.tensor()[0] for member in members]
    padding = 0 if pad is None else int(pad)
    sequences = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=padding)
    if not config.return_dict_in_generate:
        return sequences
    chooser = members[0].chooser
    collected: dict[str, Any] = {"sequences": sequences, "scores": chooser.scores, "logits": chooser.logits}
    return GenerateDecoderOnlyOutput(**collected)


def generate(
    model: Any,
    inputs: torch.Tensor | None = None,
    *,
    streamer: Any = None,
    tokenizer: Any = None,
    stop_strings: str | Sequence[str] | None = None,
    **arguments: Any,
) -> torch.Tensor | GenerateDecoderOnlyOutput:
    """Call `model.generate` with drafts.

    Args:
        inputs: int64 [texts, length], the prompts; or `input_ids=`.
        streamer: gets the prompt and every token.
        tokenizer: tokenizer of transformers, for `stop_strings`.
        stop_strings: strings that end the text.
        arguments: `drafter` and the others of `speculative_generate`, and those of `model.generate`.

    Raises:
        DecodingError: see `speculative_generate`; or there is an `assistant_model` or a cache.
        ValueError: stop strings without a tokenizer, and errors of `model.generate`.
    """
    for name, instead in (("assistant_model", "the drafter"), ("past_key_values", "their own cache")):
        if arguments.get(name) is not None:
            raise DecodingError(f"{name} is set, expected none: drafts have {instead}, so remove it")
    arguments["stopping_criteria"] = _with_stop_strings(model, tokenizer, stop_strings, arguments)
    output: torch.Tensor | GenerateDecoderOnlyOutput = model.generate(
        inputs, custom_generate=speculative_generate, token_streamer=streamer, **arguments
    )
    return output


def prepare_text(
    model: Any, inputs: torch.Tensor, *, random: torch.Generator | None = None, **generate_kwargs: Any
) -> Member:
    """Prepare a text for a batch as plain `generate` would, without generating anything."""
    found: list[Member] = []

    def prepared(
        _model: Any,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **model_kwargs: Any,
    ) -> torch.Tensor:
        mask = model_kwargs.get("attention_mask")
        rules = logits_processor, stopping_criteria, generation_config
        found.append(Member(input_ids, *rules, attention_mask=mask, random=random))
        return input_ids

    model.generate(inputs, custom_generate=prepared, **generate_kwargs)
    return found[0]


def _with_stop_strings(
    model: Any, tokenizer: Any, stop_strings: str | Sequence[str] | None, generate_kwargs: dict[str, Any]
) -> StoppingCriteriaList:
    """Return the stopping criteria of a request, including its stop strings."""
    criteria = StoppingCriteriaList(generate_kwargs.pop("stopping_criteria", None) or [])
    if stop_strings is None:
        for config in (generate_kwargs.get("generation_config"), model.generation_config):
            if config is not None and config.stop_strings is not None:
                stop_strings = config.stop_strings
                generate_kwargs["stop_strings"] = None  # otherwise transformers needs the tokenizer
                break
    if stop_strings is not None:
        if tokenizer is None:
            raise ValueError("stop_strings need the model's tokenizer: pass it as tokenizer=")
        strings = stop_strings if isinstance(stop_strings, str) else list(stop_strings)
        criteria.append(StopStringCriteria(tokenizer=tokenizer, stop_strings=strings))
    return criteria
