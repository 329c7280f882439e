"""A transformers model with its drafters as an engine; torch is imported with this module."""

import logging
from math import inf
from time import monotonic, sleep
from typing import Any

import numpy as np
from transformers.utils import logging as transformers_log

from draftstore.assembly.drafter import Assembly, assemble
from draftstore.assembly.sources import Sources
from draftstore.decoding.budget import Planner
from draftstore.decoding.grammars import Grammars
from draftstore.drafting.mixture import Mixture
from draftstore.drafting.request import RequestDrafter
from draftstore.errors import DraftstoreError, LookupServiceError, ModelError
from draftstore.hf.answering import batch_member
from draftstore.hf.batches import Batch
from draftstore.hf.exactness import require_exact
from draftstore.hf.loading import LoadedModel, ModelOptions
from draftstore.hf.members import Member
from draftstore.hf.planning import Effort, choose_plan
from draftstore.hf.requests import GenerationRequest, Sampling
from draftstore.remote.client import DEADLINE
from services.common.logs import LOADING_KERNELS
from services.worker.answers import Answer, EndedError, Engine, Facts, Terms
from services.worker.settings import WorkerSettings

LOG = logging.getLogger(__name__)
LOOKUP_WAIT_SECONDS = 10.0
"""Seconds that the lookup service has to start serving the release, unless the worker waits for it."""
WARNING_SECONDS = 10.0
"""Seconds between two warnings that it does not serve the release yet."""
DEADLINE_SHARE = 0.1
"""Part of a pass that a step waits for drafts of the lookup service: on a CPU, more than the default of 2 ms."""
Ended = list[tuple[Answer, Exception | None]]


class BatchEngine:
    """Decodes several answers together, with drafts; see `services.worker.answers.Engine`."""

    def __init__(
        self,
        loaded: LoadedModel,
        batch: Batch,
        drafters: Assembly,
        planner: Planner,
        name: str | None,
        min_prob: float,
    ) -> None:
        """Decode with a batch; `name` is shown to clients, `min_prob` is the minimum probability of a drafted node."""
        self.tokenizer = loaded.text
        self.facts = Facts(
            name or loaded.name,
            min(batch.positions, loaded.positions or batch.positions),
            loaded.vocab_size,
            frozenset(loaded.ends),
            tuple(drafters.labels),
            str(loaded.model.device),
            loaded.stops,
        )
        self.grammars = Grammars(loaded.text, loaded.vocab_size, loaded.ends)
        self._loaded, self._batch = loaded, batch
        self._drafters, self._planner, self._min_prob = drafters, planner, min_prob
        self._others = drafters.without_live()
        self._answers: dict[Member, Answer] = {}

    @property
    def room(self) -> int:
        """Number of answers that can be started now."""
        return self._batch.most - len(self._batch)

    def _sources(self, request: GenerationRequest) -> Assembly:
        drafters = self._drafters if request.live else self._others
        if request.prediction is not None and len(request.prediction):
            drafters = drafters.predicting(request.prediction)
        if request.grammar is not None:
            drafters = drafters.following(request.grammar, len(request.prompt))
        return drafters

    def join(self, answer: Answer) -> None:
        """Start an answer."""
        request, sources, least = answer.request, self._sources(answer.request), self._min_prob
        answer.sources = sources.labels
        drafter = sources if sources.parts and request.budget != 0 else None
        member = batch_member(self._loaded, request, drafter=drafter, planner=self._planner, min_prob=least)
        self._batch.join(member)
        self._answers[member] = answer

    def leave(self, answer: Answer) -> None:
        """End an answer."""
        for member in [member for member, other in self._answers.items() if other is answer]:
            self._batch.leave(member)
            del self._answers[member]

    def step(self) -> Ended:
        """Run a forward pass over all answers; if it fails, all of them do."""
        ended: Ended = []
        try:
            results = self._batch.step()
        except Exception as fault:  # noqa: BLE001 (reported for each answer)
            results, ended = [], [(answer, fault) for answer in self._answers.values()]
        for member, result in results:
            answer, error = self._answers[member], result if isinstance(result, Exception) else None
            try:
                if not isinstance(result, Exception):
                    answer.take(result)
            except Exception as reason:  # noqa: BLE001 (that is how an answer ends)
                error = reason
            if error is not None or member.over:
                ended.append((answer, error))
        for answer, _ in ended:
            self.leave(answer)
        return ended

    def remember(self, answer: Answer, digest: bytes) -> None:
        """Append a finished answer to the live store; never raises."""
        if answer.request.live:
            self._drafters.remember(answer.request.prompt, answer.tokens, digest)

    def close(self) -> None:
        """Close stores and connections."""
        self._batch.close()
        self._drafters.close()


def load_engine(model: ModelOptions, sources: Sources, effort: Effort, settings: WorkerSettings) -> Engine:
    """Load the model with its drafters from `sources`; `effort` limits the verified drafts."""
    begin = monotonic()
    transformers_log.disable_default_handler()
    transformers_log.enable_propagation()
    transformers_log.set_verbosity(logging.ERROR)  # it warns about intended settings
    loaded = model.load(model.model)
    LOG.info("model loaded", extra={"model": loaded.name, "seconds": round(monotonic() - begin, 1)})
    LOG.info(LOADING_KERNELS)
    engine = _engine_of(loaded, sources, effort, settings)
    Mixture([RequestDrafter(2)]).warm_up()  # answers in JSON mix the grammar in
    try:
        for count in sorted({1, min(2, engine.room)}):
            _warm_up(engine, count)
    except DraftstoreError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise ModelError(
            f"{loaded.name!r} cannot be decoded ({reason}): check its files and settings"
        ) from error
    return engine


def _engine_of(loaded: LoadedModel, sources: Sources, effort: Effort, settings: WorkerSettings) -> Engine:
    """Return the engine of a model; DecodingError if it takes no drafts."""
    require_exact(loaded.model)  # before its stores are opened
    plan = choose_plan(effort, loaded)
    if sources.deadline is None:
        sources = sources.model_copy(update={"deadline": max(DEADLINE, DEADLINE_SHARE * plan.seconds)})
    drafters = _assembled(loaded, sources, inf if settings.wait else LOOKUP_WAIT_SECONDS)
    drafting = {"plan": plan.words, "drafters": [part.name for part in drafters.parts]}
    LOG.info("drafting", extra=drafting | {"lookup_deadline": sources.deadline})
    batch = Batch(loaded.model, most=settings.max_batch, tokens=settings.max_tokens_in_flight)
    LOG.info("batches", extra={"most": batch.most, "tokens": batch.positions})
    return BatchEngine(loaded, batch, drafters, plan.planner, settings.name, effort.min_prob)


def _assembled(loaded: LoadedModel, sources: Sources, patience: float) -> Assembly:
    """Return the assembled drafters; retries while the lookup service does not serve the release yet."""
    model: dict[str, Any] = {"model": loaded.name, "hidden_size": loaded.hidden_size}
    model |= {"vocab_size": loaded.vocab_size, "tokenizer": loaded.text.identity}
    end, said = monotonic() + patience, -inf
    while True:
        try:
            return assemble(sources, **model)
        except LookupServiceError as error:
            if monotonic() > end:
                raise
            if monotonic() - said >= WARNING_SECONDS:
                said = monotonic()
                LOG.warning(
                    "no drafts from the lookup service yet: trying again", extra={"error": str(error)}
                )
            sleep(1.0)


def _warm_up(engine: Engine, count: int) -> None:
    """Compile what the first answers would wait for, by decoding `count` of them together."""
    ids = np.zeros(2, np.int32)
    # Drafting from a prediction uses kernels that the other drafters may not need.
    request = GenerationRequest(ids, 4, Sampling(temperature=0.0), prediction=ids, live=False)
    for choice in range(count):
        engine.join(Answer(choice, request, Terms("warm-up", engine.tokenizer), lambda _: None))
    while count:
        for _, error in engine.step():
            count -= 1
            if error is not None and not isinstance(error, EndedError):
                raise error
