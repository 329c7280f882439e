"""The engines of the worker: a transformers model with its drafters, for several answers together or one at a time."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from draftstore.assembly import Assembly
from draftstore.decoding.loop import Planner, Step
from draftstore.drafting.drafter import Drafter
from draftstore.hf.answering import batch_member, decode_request
from draftstore.hf.batches import Batch
from draftstore.hf.likelihoods import Likelihoods
from draftstore.hf.loading import LoadedModel
from draftstore.hf.members import Member
from draftstore.hf.requests import GenerationRequest, Sampling
from draftstore.text.tokenizer import TextTokenizer
from services.worker.work import Answer, Engine, Facts

UNBOUNDED = 1 << 20
"""Positions of models without a stated maximum."""


class _ModelEngine:
    """A model with its drafters, whatever the way to decode.

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
        positions: int = UNBOUNDED,
    ) -> None:
        """Prepare speculative decoding."""
        self.tokenizer: TextTokenizer = loaded.text
        self._loaded = loaded
        self._drafters = drafters
        self._planner = planner
        self._min_prob = min_prob
        release = drafters.part("lookup")
        self.facts = Facts(
            name=name or loaded.name,
            positions=min(positions, loaded.positions or UNBOUNDED),
            vocab_size=loaded.vocab_size,
            ends=frozenset(loaded.ends),
            drafters=tuple(part.label for part in drafters.parts),
            release=release.name if release else "",
            device=str(loaded.model.device),
        )

    def _drafter(self, request: GenerationRequest) -> Drafter | None:
        """Return the drafter for a request: none if it wants none, and one that knows its prediction."""
        if request.budget == 0:
            return None
        if request.prediction is not None and len(request.prediction):
            return self._drafters.predicting(request.prediction, self._loaded.vocab_size)
        return self._drafters if self._drafters.parts else None

    def close(self) -> None:
        """Close stores and connections."""
        self._drafters.close()


class BatchEngine(_ModelEngine):
    """Decodes several answers together; see `services.worker.work.Engine`."""

    def __init__(self, batch: Batch, *model: object, **settings: object) -> None:
        """Decode with a batch; see `_ModelEngine` for the rest."""
        super().__init__(*model, **settings)  # type: ignore[arg-type]
        self._batch = batch
        self._answers: dict[Member, tuple[Answer, Likelihoods | None]] = {}

    @property
    def room(self) -> int:
        """Number of answers that can be started now."""
        return self._batch.most - len(self._batch)

    @property
    def last_pass(self) -> tuple[int, float] | None:
        """Answers in the last pass, and the share of what they saw that holds tokens."""
        return self._batch.last_pass

    def join(self, answer: Answer) -> None:
        """Start an answer."""
        likelihoods = None if answer.request.top is None else Likelihoods(answer.request.top)
        member = batch_member(
            self._loaded,
            answer.request,
            drafter=self._drafter(answer.request),
            planner=self._planner,
            min_prob=self._min_prob,
            likelihoods=likelihoods,
        )
        self._batch.join(member)
        self._answers[member] = answer, likelihoods

    def leave(self, answer: Answer) -> None:
        """End an answer."""
        for member in [member for member, (other, _) in self._answers.items() if other is answer]:
            self._drop(member)

    def _drop(self, member: Member) -> None:
        self._batch.leave(member)
        del self._answers[member]

    def step(self) -> list[tuple[Answer, Exception | None]]:
        """Run a forward pass over all answers; if it fails, all of them do."""
        try:
            outcomes = self._batch.step()
        except Exception as fault:  # noqa: BLE001 (reported for each answer)
            failed: list[tuple[Answer, Exception | None]] = [
                (answer, fault) for answer, _ in self._answers.values()
            ]
            for member in list(self._answers):
                self._drop(member)
            return failed
        ended: list[tuple[Answer, Exception | None]] = []
        for member, step, failure in outcomes:
            answer, likelihoods = self._answers[member]
            error = failure if step is None else _taken(answer, step, likelihoods)
            if error is not None or member.generated.over:
                self._drop(member)
                ended.append((answer, error))
        return ended


class SingleEngine(_ModelEngine):
    """Decodes one answer at a time, for models that take no batches; see `services.worker.work.Engine`."""

    _answer: Answer | None = None
    last_pass = None

    @property
    def room(self) -> int:
        """Number of answers that can be started now."""
        return int(self._answer is None)

    def join(self, answer: Answer) -> None:
        """Start an answer."""
        self._answer = answer

    def leave(self, answer: Answer) -> None:
        """End an answer."""
        if self._answer is answer:
            self._answer = None

    def step(self) -> list[tuple[Answer, Exception | None]]:
        """Decode the whole answer."""
        answer, self._answer = self._answer, None
        if answer is None:
            return []
        likelihoods = None if answer.request.top is None else Likelihoods(answer.request.top)

        def take(step: Step) -> None:
            if (error := _taken(answer, step, likelihoods)) is not None:
                raise error

        try:
            decode_request(
                self._loaded,
                answer.request,
                drafter=self._drafter(answer.request),
                planner=self._planner,
                min_prob=self._min_prob,
                on_step=take,
                likelihoods=likelihoods,
            )
        except Exception as error:  # noqa: BLE001 (reported)
            return [(answer, error)]
        return [(answer, None)]


def _taken(answer: Answer, step: Step, likelihoods: Likelihoods | None) -> Exception | None:
    """Hand a pass to an answer; return what ends it."""
    try:
        answer.take(step, likelihoods.take(step.tokens.tolist()) if likelihoods else ())
    except Exception as error:  # noqa: BLE001 (that is how an answer ends)
        return error
    return None


class _Nobody(NamedTuple):
    """An answer that nobody reads."""

    request: GenerationRequest

    def take(self, step: Step, likelihoods: object) -> None:
        """Drop a pass."""


def warm_up(engine: Engine, answers: Iterable[int] = (1,)) -> None:
    """Compile everything that the first answers would wait for.

    Args:
        engine: the engine.
        answers: numbers of answers that are decoded together, one after the other.

    Raises:
        Exception: the model cannot decode.
    """
    left, ids = 0, np.zeros(2, np.int32)
    # A prediction is drafted from by kernels that no other drafter may need.
    request = GenerationRequest(ids, 4, Sampling(temperature=0.0), prediction=ids)
    for count in answers:
        for _ in range(min(count, engine.room)):
            engine.join(_Nobody(request))
            left += 1
        while left:
            for _, error in engine.step():
                left -= 1
                if error is not None:
                    raise error
