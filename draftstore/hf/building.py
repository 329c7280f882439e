"""What stores are built from, loaded."""

from typing import Any

from draftstore.hf.loading import load_model
from draftstore.stores.kind import ModelSources, TextSources, Workers


def materials(by: Workers | ModelSources, **given: Any) -> dict[str, Any]:
    """Return keywords for a `Builder`: those given, and the workers or the model that `by` names; see `load_model`."""
    if not isinstance(by, ModelSources):
        spread = {"cluster": by.cluster} if isinstance(by, TextSources) else {}
        return {"workers": by.workers, **spread, **given}
    loaded = load_model(by.model, dtype=by.model_dtype, device=by.device)
    from draftstore.hf.states import ModelStates  # imports torch

    return {"tokenizer": loaded.text, "source": ModelStates(loaded, batch_tokens=by.batch_tokens), **given}
