"""Decoding of one request with a loaded model: the only place that maps a request to arguments of `generate`."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import LogitsProcessorList

from draftstore.decoding.budget import capped
from draftstore.decoding.loop import Fixed, Planner, Step
from draftstore.drafting.drafter import Drafter
from draftstore.hf.batch_generation import seeded
from draftstore.hf.generation import generate
from draftstore.hf.likelihoods import Likelihoods
from draftstore.hf.loading import LoadedModel
from draftstore.hf.members import Member
from draftstore.hf.penalties import Penalties
from draftstore.hf.requests import GREEDY, GenerationRequest, Sampling
from draftstore.hf.targets import ForwardFactory
from draftstore.hf.texts import prepare_text


def decode_request(
    loaded: LoadedModel,
    request: GenerationRequest,
    *,
    drafter: Drafter | None,
    planner: Planner | None = None,
    min_prob: float = 0.0,
    on_step: Callable[[Step], None] | None = None,
    forward: ForwardFactory | None = None,
    likelihoods: Likelihoods | None = None,
) -> None:
    """Decode the answer to one request; its tokens go to `on_step`.

    Args:
        loaded: the model.
        request: the request.
        drafter: None decodes without drafts, in the same loop.
        planner: see `draftstore.hf.generate`, as for all that follow.
        min_prob: minimum probability of a drafted node.
        on_step: called after every pass, the prefill first.
        forward: runs the passes.
        likelihoods: notes how likely the tokens are.
    """
    if request.sampling.seed is None:
        torch.seed()
    else:
        torch.manual_seed(request.sampling.seed)
    generate(
        **_arguments(loaded, request, likelihoods),
        drafter=drafter,
        planner=capped(planner or Fixed(), request.budget),
        min_prob=min_prob,
        on_step=on_step,
        forward=forward,
    )


def batch_member(
    loaded: LoadedModel,
    request: GenerationRequest,
    *,
    drafter: Drafter | None,
    planner: Planner,
    min_prob: float = 0.0,
    likelihoods: Likelihoods | None = None,
) -> Member:
    """Return the answer to a request as a text for a batch; see `decode_request`.

    Raises:
        ValueError: `generate` refuses an argument.
        DecodingError: the model cannot be decoded with drafts.
    """
    random = seeded(request.sampling.seed, loaded.model.device)
    text = prepare_text(**_arguments(loaded, request, likelihoods), random=random)
    return Member(text, drafter, capped(planner, request.budget), min_prob)


def _arguments(
    loaded: LoadedModel, request: GenerationRequest, likelihoods: Likelihoods | None
) -> dict[str, Any]:
    """Return the model, the prompt, and the arguments of `generate` for a request."""
    model: Any = loaded.model
    prompt = torch.from_numpy(request.prompt.astype(np.int64))[None].to(model.device)
    arguments = generation_arguments(loaded, request)
    if likelihoods is not None:
        arguments.setdefault("logits_processor", LogitsProcessorList()).append(likelihoods)
    return {"model": model, "inputs": prompt, "attention_mask": torch.ones_like(prompt), **arguments}


def generation_arguments(loaded: LoadedModel, request: GenerationRequest) -> dict[str, Any]:
    """Return the arguments of `generate` for a request: stopping, sampling, cache."""
    model: Any = loaded.model
    sampling, ends = request.sampling, request.ends(loaded.ends)
    arguments = {
        "max_new_tokens": request.max_tokens,
        "use_cache": True,  # MPT, for one, leaves it off
        "eos_token_id": ends or None,
        "pad_token_id": ends[0] if ends else None,
        **({"min_new_tokens": request.min_tokens} if request.min_tokens else {}),
        **_choices(sampling, model.generation_config),
    }
    if sampling.presence or sampling.frequency or sampling.bias:
        penalties = Penalties(
            len(request.prompt), presence=sampling.presence, frequency=sampling.frequency, bias=sampling.bias
        )
        arguments["logits_processor"] = LogitsProcessorList([penalties])
    # CUDA graphs need a static cache, and help only models with the same pass every time.
    if model.device.type == "cuda" and getattr(model, "_can_compile_fullgraph", False):
        arguments["cache_implementation"] = "static"
    return arguments


def _choices(sampling: Sampling, own: Any) -> dict[str, Any]:
    """Return the sampling arguments; the model's `own` settings fill in what the request leaves open."""

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
