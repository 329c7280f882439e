"""The model of transformers that answers, and what drafts for it."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import LogitsProcessorList

from draftstore.assembly import Assembly
from draftstore.decoding.loop import Planner, Step
from draftstore.hf.generation import generate
from draftstore.hf.loading import LoadedModel
from draftstore.hf.targets import ForwardFactory
from draftstore.text.tokenizer import TextTokenizer
from services.worker.penalties import Penalties
from services.worker.work import GREEDY, Facts, Sampling, Work

UNBOUNDED = 1 << 20
"""Positions of models that tell no number."""


class TransformersEngine:
    """A model with its drafters; see `services.worker.work.Engine`.

    Attributes:
        facts: what it is.
        tokenizer: of the model.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        drafters: Assembly,
        planner: Planner,
        *,
        name: str | None = None,
        min_prob: float = 0.0,
        forward: ForwardFactory | None = None,
    ) -> None:
        """Decode with drafts.

        Args:
            loaded: model and tokenizer.
            drafters: closed with the engine.
            planner: chooses how much of a draft is verified.
            name: under which the model is asked for; by default its own.
            min_prob: least probability of a drafted node.
            forward: runs the passes, see `draftstore.hf.generate`.
        """
        self.tokenizer: TextTokenizer = loaded.text
        self._model: Any = loaded.model
        self._drafters = drafters
        self._planner = planner
        self._min_prob = min_prob
        self._forward = forward
        self._cache = _cache_of(self._model)
        self._ends = loaded.ends
        self.facts = Facts(
            name=name or loaded.name,
            positions=loaded.positions or UNBOUNDED,
            vocab_size=loaded.vocab_size,
            ends=frozenset(self._ends),
            drafters=tuple(_label(part.kind, part.name) for part in drafters.parts),
            device=str(self._model.device),
        )

    def warm_up(self) -> None:
        """Have everything compiled that a first answer would wait for."""
        self.generate(Work(np.zeros(2, np.int32), 4, Sampling(temperature=0.0)), lambda _step: None)

    def generate(self, work: Work, on_step: Callable[[Step], None]) -> None:
        """Decode; see `services.worker.work.Engine`."""
        prompt = torch.from_numpy(work.prompt).to(torch.int64)[None].to(self._model.device)
        seed = work.sampling.seed
        if seed is None:
            torch.seed()
        else:
            torch.manual_seed(seed)
        generate(
            self._model,
            prompt,
            attention_mask=torch.ones_like(prompt),
            drafter=self._drafters if self._drafters.parts else None,
            planner=self._planner,
            min_prob=self._min_prob,
            forward=self._forward,
            on_step=on_step,
            max_new_tokens=work.max_tokens,
            eos_token_id=self._ends or None,
            pad_token_id=self._ends[0] if self._ends else None,
            logits_processor=_processors(work),
            **_choices(work.sampling, self._model.generation_config),
            **self._cache,
        )

    def close(self) -> None:
        """Close stores and connections."""
        self._drafters.close()


def _cache_of(model: Any) -> dict[str, Any]:
    """Return the arguments of `generate` for the cache: on a GPU a static one, for CUDA graphs."""
    static = model.device.type == "cuda" and getattr(model, "_can_compile_fullgraph", False)
    return {"cache_implementation": "static"} if static else {}


def _label(kind: str, name: str) -> str:
    """Return what to call a drafter: that there are several stores matters, how the request is called does not."""
    return kind if kind in ("request", "recycling") else f"{kind}:{name}"


def _processors(work: Work) -> LogitsProcessorList:
    """Return what changes logits beside transformers' own."""
    sampling = work.sampling
    if not (sampling.presence or sampling.frequency or sampling.bias):
        return LogitsProcessorList()
    penalties = Penalties(
        len(work.prompt), presence=sampling.presence, frequency=sampling.frequency, bias=sampling.bias
    )
    return LogitsProcessorList([penalties])


def _choices(sampling: Sampling, own: Any) -> dict[str, Any]:
    """Return how tokens are chosen, as arguments of `generate`.

    Args:
        sampling: what the request says.
        own: the generation settings of the model, for what it does not say.
    """

    def told(name: str, usual: Any) -> Any:
        values = (getattr(sampling, name), getattr(own, name, None), usual)
        return next((value for value in values if value is not None), None)

    chosen = {"repetition_penalty": told("repetition_penalty", 1.0)}
    temperature, top_p = float(told("temperature", 1.0)), float(told("top_p", 1.0))
    if temperature < GREEDY or top_p == 0.0:
        return chosen | {"do_sample": False}
    # Transformers keeps 50 tokens unless told otherwise.
    filters = {"top_p": top_p, "top_k": told("top_k", 0), "min_p": told("min_p", None)}
    return chosen | {"do_sample": True, "temperature": temperature} | filters
