"""From the options of `draftstore worker` to its engine; everything of torch is imported when the model is loaded."""

import logging
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING

from draftstore.assembly import Sources, assemble
from draftstore.cli.sources import Effort
from services.worker.work import Engine

if TYPE_CHECKING:
    from draftstore.hf.loading import LoadedModel

LOG = logging.getLogger(__name__)


def loader(
    model: str,
    sources: Sources,
    effort: Effort,
    *,
    name: str | None = None,
    device: str | None = None,
    dtype: str | None = None,
    attention: str | None = None,
) -> Callable[[], Engine]:
    """Return what loads a model with its drafters.

    Args:
        model: a directory, a hub name, or a GGUF file.
        sources: what to draft from.
        effort: how much is verified.
        name: what clients call the model.
        device: see `draftstore.hf.loading.load_model`, like the next two.
        dtype: likewise.
        attention: likewise.
    """

    def load() -> Engine:
        begin = monotonic()
        from draftstore.hf.loading import load_model

        _tame_transformers()
        loaded = load_model(model, dtype=dtype, device=device, attention=attention)
        LOG.info("model loaded", extra={"model": loaded.name, "seconds": round(monotonic() - begin, 1)})
        engine = _engine(loaded, sources, effort, name)
        engine.warm_up()
        return engine

    return load
