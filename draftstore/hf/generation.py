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
from transformers.generation.stopping_criteria import StoppingCriteriaList, StopStringCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput

from draftstore.decoding.loop import Fixed, Planner, Step
from draftstore.drafting.drafter import Drafter
from draftstore.errors import DecodingError
from draftstore.hf.batch_generation import check_batch, generate_texts, seeded
from draftstore.hf.checks import check_request, takes_trees
from draftstore.hf.exactness import require_exact
from draftstore.hf.graphs import graph_forward
from draftstore.hf.masks import masks_by_model
from draftstore.hf.members import Member
from draftstore.hf.running import Run
from draftstore.hf.targets import ChainForward, Forward, ForwardFactory, Prefilled, TreeForward
from draftstore.hf.texts import GeneratedText


@torch.no_grad()
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
    forward: ForwardFactory | None = None,
    seeds: Sequence[int] | None = None,
    **model_kwargs: Any,
) -> torch.Tensor | GenerateDecoderOnlyOutput:
    """Generate with drafts, as `model.generate(..., custom_generate=speculative_generate, drafter=...)`.

    The output is that of plain `generate`, greedy token by token, and sampled with the same seed, except for rounding,
    which differs between passes over one row and over many.

    Args:
        model: a causal language model of transformers 5.
        input_ids: int64 [texts, length], the prompts, padded on the left; `num_return_sequences` repeats each.
        logits_processor: as prepared by `generate`, as for the next two.
        stopping_criteria: when the text ends.
        generation_config: configuration of this call.
        drafter: proposes drafts; None decodes without.
        budget: maximum nodes of a draft, without a planner.
        planner: chooses how much of a draft is verified.
        min_prob: minimum probability of a drafted node.
        token_streamer: gets the prompt and every token, as `streamer` in plain `generate`.
        on_step: called after the prefill, as a step with an empty tree, and after every pass. An exception that it
            raises ends generation; the cache then holds all tokens but the last of that step.
        forward: runs the passes of one text, see `draftstore.hf.targets`; by default chosen by model and cache.
        seeds: one for each text: sampled, it is the text that plain generate returns for its prompt alone after
            `torch.manual_seed(seed)`. By default one text takes torch's random numbers, and several take seeds from
            them.
        model_kwargs: arguments of the model.

    Returns:
        int64 [texts, length], prompts and outputs, or with `return_dict_in_generate` what plain generate returns.
        Behind the end of a text that is shorter than others stands the pad id.

    Raises:
        DecodingError: unsupported generation: beams, encoder-decoder models, linear attention, no cache or one without
            rollback, attentions as an output; a model that reads several tokens otherwise than one by one, see
            `draftstore.hf.exactness`; several texts of a model that takes one at a time, or with a streamer, scores,
            logits or hidden states.
    """
    check_request(model, generation_config, model_kwargs, drafting=drafter is not None)
    if drafter is not None:
        require_exact(model)
    planner = (planner or Fixed(budget)) if drafter is not None else Fixed(0)
    if len(input_ids) > 1:
        check_batch(generation_config, model_kwargs, logits_processor, token_streamer, forward)
        return generate_texts(
            model,
            input_ids,
            logits_processor,
            stopping_criteria,
            generation_config,
            model_kwargs.get("attention_mask"),
            lambda text: Member(text, drafter, planner, min_prob),
            on_step,
            seeds,
        )
    if token_streamer is not None:
        token_streamer.put(input_ids.cpu())
    text = GeneratedText(
        input_ids,
        logits_processor,
        stopping_criteria,
        generation_config,
        attention_mask=model_kwargs.get("attention_mask"),
        streamer=token_streamer,
        random=None if seeds is None else seeded(seeds[0], input_ids.device),
    )
    run = Run(model, input_ids, generation_config, text)
    steps = run.steps(model_kwargs, drafter, planner, min_prob, forward or default_forward)
    with masks_by_model(model, model_kwargs["past_key_values"]), closing(steps):
        for step in steps:
            if on_step is not None:
                on_step(step)
    if token_streamer is not None:
        token_streamer.end()
    return run.result()


def generate(
    model: Any,
    inputs: torch.Tensor | None = None,
    *,
    drafter: Drafter | None = None,
    budget: int = 64,
    planner: Planner | None = None,
    min_prob: float = 0.0,
    streamer: Any = None,
    tokenizer: Any = None,
    stop_strings: str | Sequence[str] | None = None,
    on_step: Callable[[Step], None] | None = None,
    forward: ForwardFactory | None = None,
    seeds: Sequence[int] | None = None,
    **generate_kwargs: Any,
) -> torch.Tensor | GenerateDecoderOnlyOutput:
    """Call `model.generate` with drafts; all its arguments work as usual.

    Args:
        model: a causal language model of transformers 5.
        inputs: int64 [texts, length], the prompts; or `input_ids=`.
        drafter: see `speculative_generate`, as for the next three.
        budget: maximum nodes of a draft.
        planner: chooses how much of it is verified.
        min_prob: minimum probability of a node.
        streamer: gets the prompt and every token.
        tokenizer: tokenizer of transformers, for `stop_strings`.
        stop_strings: strings that end the text.
        on_step: see `speculative_generate`.
        forward: runs the passes.
        seeds: one for each text.
        generate_kwargs: further arguments of `model.generate`.

    Raises:
        DecodingError: see `speculative_generate`; or there is an `assistant_model`.
        ValueError: stop strings without a tokenizer, and errors of `model.generate`.
    """
    if generate_kwargs.get("assistant_model") is not None:
        raise DecodingError(
            "assistant_model is set, expected none: drafts come from the drafter, so leave it out"
        )
    generate_kwargs["stopping_criteria"] = _with_stop_strings(model, tokenizer, stop_strings, generate_kwargs)
    output: torch.Tensor | GenerateDecoderOnlyOutput = model.generate(
        inputs,
        custom_generate=speculative_generate,
        drafter=drafter,
        budget=budget,
        planner=planner,
        min_prob=min_prob,
        token_streamer=streamer,
        on_step=on_step,
        forward=forward,
        seeds=seeds,
        **generate_kwargs,
    )
    return output


def default_forward(prefilled: Prefilled) -> Forward:
    """Return the default way to run passes: CUDA graphs, else trees, else chains."""
    if (forward := graph_forward(prefilled)) is not None:
        return forward
    trees = takes_trees(prefilled.model, prefilled.memory, prefilled.model_kwargs)
    return TreeForward(prefilled) if trees else ChainForward(prefilled)


def _with_stop_strings(
    model: Any, tokenizer: Any, stop_strings: str | Sequence[str] | None, generate_kwargs: dict[str, Any]
) -> StoppingCriteriaList:
    """Return the stopping criteria of a request, including that of its stop strings."""
    criteria = StoppingCriteriaList(generate_kwargs.pop("stopping_criteria", None) or [])
    if stop_strings is None:
        for config in (generate_kwargs.get("generation_config"), model.generation_config):
            if config is not None and config.stop_strings is not None:
                stop_strings = config.stop_strings
                generate_kwargs["stop_strings"] = None  # otherwise transformers needs the tokenizer
                break
    if stop_strings is not None:
        if tokenizer is None:
            raise ValueError("stop_strings need the model's tokenizer: give it as tokenizer=")
        strings = stop_strings if isinstance(stop_strings, str) else list(stop_strings)
        criteria.append(StopStringCriteria(tokenizer=tokenizer, stop_strings=strings))
    return criteria
