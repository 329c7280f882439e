"""Retrieval-based speculative decoding: draft stores built from text, drafts from them in microseconds.

    import draftstore

    store = draftstore.open_store("stores/chat")
    session = store.drafter().session(prompt_ids)
    tree = session.propose(budget=64)

Each name is imported when it is first used; `draftstore.hf` decodes with transformers.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0.dev0"

if TYPE_CHECKING:
    from draftstore.drafting.drafter import Drafter
    from draftstore.drafting.mixture import Mixture
    from draftstore.drafting.request import RequestDrafter
    from draftstore.errors import DraftstoreError
    from draftstore.live.recall import RecallDrafter
    from draftstore.live.shared import Vocabulary
    from draftstore.live.store import LiveStore
    from draftstore.recycling.drafter import RecyclingDrafter
    from draftstore.remote.client import RemoteStore
    from draftstore.stores.registry import open_store
    from draftstore.text.tokenizer import load_tokenizer
    from draftstore.trees.tree import DraftTree

_HOMES = {
    "DraftTree": "trees.tree",
    "Drafter": "drafting.drafter",
    "DraftstoreError": "errors",
    "LiveStore": "live.store",
    "Mixture": "drafting.mixture",
    "RecallDrafter": "live.recall",
    "RecyclingDrafter": "recycling.drafter",
    "RemoteStore": "remote.client",
    "RequestDrafter": "drafting.request",
    "Vocabulary": "live.shared",
    "load_tokenizer": "text.tokenizer",
    "open_store": "stores.registry",
}
__all__ = [
    "DraftTree", "Drafter", "DraftstoreError", "LiveStore", "Mixture", "RecallDrafter", "RecyclingDrafter",
    "RemoteStore", "RequestDrafter", "Vocabulary", "load_tokenizer", "open_store",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import a name on its first use."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
