"""Speculative decoding with transformers.

    from draftstore.hf import generate, load_model

    model, tokenizer, _ = load_model("models/SmolLM2-135M-Instruct")
    generate(model, **inputs, drafter=drafter, max_new_tokens=200)

torch and transformers are imported when one of these names is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from draftstore.errors import needs_extra

if TYPE_CHECKING:
    from draftstore.hf.generation import generate, speculative_generate
    from draftstore.hf.loading import load_model

__all__ = ["generate", "load_model", "speculative_generate"]


def __getattr__(name: str) -> Any:
    """Import a name; MissingExtraError if torch or transformers is missing."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    for package in ("torch", "transformers"):
        with needs_extra(package, "hf"):
            import_module(package)
    return getattr(import_module(f"{__name__}.{'loading' if name == 'load_model' else 'generation'}"), name)
