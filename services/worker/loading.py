"""Loading the engine from the options of `draftstore worker`; torch is imported only when the model is loaded."""

import logging
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

from draftstore.assembly import Assembly, Sources, assemble
from draftstore.decoding.loop import Planner
from draftstore.errors import LookupServiceError
from draftstore.hf.planning import Effort, choose_plan
from services.worker.settings import BATCH
from services.worker.work import Engine

if TYPE_CHECKING:
    from draftstore.hf.loading import LoadedModel

LOG = logging.getLogger(__name__)
LOOKUP_WAIT_SECONDS = 10.0
"""Seconds that the lookup service has to start serving the release."""


def load_engine(
    model: str,
    sources: Sources,
    effort: Effort,
    *,
    name: str | None = None,
    device: str | None = None,
    dtype: str | None = None,
    attention: str | None = None,
    patience: float = LOOKUP_WAIT_SECONDS,
    most: int = BATCH,
    tokens: int | None = None,
) -> Engine:
    """Load a model with its drafters.

    Args:
        model: a directory, a hub name, or a GGUF file.
        sources: sources of drafts.
        effort: how much is verified.
        name: name of the model for clients.
        device: see `draftstore.hf.loading.load_model`, as for the next two.
        dtype: type of the weights.
        attention: attention implementation.
        patience: seconds that the lookup service has to serve the release; the model stays loaded meanwhile.
        most: maximum answers that are decoded together.
        tokens: maximum tokens of all of them; None: what there is memory for.
    """
    begin = monotonic()
    from draftstore.hf.loading import load_model
    from services.worker.engine import warm_up

    _tame_transformers()
    loaded = load_model(model, dtype=dtype, device=device, attention=attention)
    LOG.info("model loaded", extra={"model": loaded.name, "seconds": round(monotonic() - begin, 1)})
    plan = choose_plan(effort, loaded)
    drafters = _assembled(loaded, sources, patience)
    LOG.info("drafting", extra={"plan": plan.words, "drafters": [part.name for part in drafters.parts]})
    engine = _engine(loaded, drafters, plan.planner, name, effort.min_prob, most, tokens)
    warm_up(engine, (1, min(2, most)))
    return engine


def _engine(
    loaded: "LoadedModel",
    drafters: Assembly,
    planner: Planner,
    name: str | None,
    min_prob: float,
    most: int,
    tokens: int | None,
) -> Engine:
    """Return an engine for batches, if the model takes them."""
    from draftstore.hf.batches import Batch, why_alone
    from services.worker.engine import BatchEngine, SingleEngine

    settings: dict[str, Any] = {"name": name, "min_prob": min_prob}
    why = why_alone(loaded.model)
    if why is not None or most == 1:
        if why is not None:
            LOG.warning("one answer at a time", extra={"reason": why})
        return SingleEngine(loaded, drafters, planner, **settings)
    batch = Batch(loaded.model, most=most, tokens=tokens)
    LOG.info("batches", extra={"most": batch.most, "tokens": batch.positions})
    return BatchEngine(batch, loaded, drafters, planner, positions=batch.positions, **settings)


def _assembled(loaded: "LoadedModel", sources: Sources, patience: float) -> Assembly:
    """Return the assembled drafters; retries while the lookup service does not serve the release yet."""
    end = monotonic() + patience
    while True:
        try:
            return assemble(
                sources,
                vocab_size=loaded.vocab_size,
                tokenizer=loaded.text.identity,
                model=loaded.name,
                hidden_size=loaded.hidden_size,
            )
        except LookupServiceError as error:
            if monotonic() > end:
                raise
            LOG.warning("no drafts from the lookup service yet: trying again", extra={"error": str(error)})
            sleep(1.0)


def _tame_transformers() -> None:
    """Route transformers' log through ours, errors only: it warns about intended settings."""
    from transformers.utils import logging as own

    own.disable_default_handler()
    own.enable_propagation()
    own.set_verbosity(logging.ERROR)
