"""The engine of the worker: a transformers model with its drafters."""

import numpy as np

from draftstore.assembly import Assembly
from draftstore.decoding.loop import Planner, Step
from draftstore.hf.answering import decode_request
from draftstore.hf.likelihoods import Likelihoods
from draftstore.hf.loading import LoadedModel
from draftstore.hf.requests import GenerationRequest, Sampling
from draftstore.hf.targets import ForwardFactory
from draftstore.text.tokenizer import TextTokenizer
from services.worker.work import Facts, OnStep

UNBOUNDED = 1 << 20
"""Positions of models without a stated maximum."""


class TransformersEngine:
    """A model with its drafters; see `services.worker.work.Engine`.

    Attributes:
        facts: facts about the model.
        tokenizer: tokenizer of the model.
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
        """Prepare speculative decoding.

        Args:
            loaded: model and tokenizer.
            drafters: drafters, closed with the engine.
            planner: chooses how much of a draft is verified.
            name: name of the model for clients; by default its own.
            min_prob: minimum probability of a drafted node.
            forward: runs the passes, see `draftstore.hf.generate`.
        """
        self.tokenizer: TextTokenizer = loaded.text
        self._loaded = loaded
        self._drafters = drafters
        self._planner = planner
        self._min_prob = min_prob
        self._forward = forward
        release = drafters.part("lookup")
        self.facts = Facts(
            name=name or loaded.name,
            positions=loaded.positions or UNBOUNDED,
            vocab_size=loaded.vocab_size,
            ends=frozenset(loaded.ends),
            drafters=tuple(_label(part.kind, part.name) for part in drafters.parts),
            release=release.name if release else "",
            device=str(loaded.model.device),
        )

    def warm_up(self) -> None:
        """Compile everything that the first answer would wait for."""
        request = GenerationRequest(np.zeros(2, np.int32), 4, Sampling(temperature=0.0))
        self.generate(request, lambda _step, _likelihoods: None)

    def generate(self, request: GenerationRequest, on_step: OnStep) -> None:
        """Decode; see `services.worker.work.Engine`."""
        likelihoods = None if request.top is None else Likelihoods(request.top)

        def stepped(step: Step) -> None:
            on_step(step, likelihoods.take(step.tokens.tolist()) if likelihoods else ())

        decode_request(
            self._loaded,
            request,
            drafter=self._drafters if self._drafters.parts else None,
            planner=self._planner,
            min_prob=self._min_prob,
            on_step=stepped,
            forward=self._forward,
            likelihoods=likelihoods,
        )

    def close(self) -> None:
        """Close stores and connections."""
        self._drafters.close()


def _label(kind: str, name: str) -> str:
    """Return the label of a drafter: `KIND:NAME` for stores and releases, else its kind."""
    return kind if kind in ("request", "recycling") else f"{kind}:{name}"
