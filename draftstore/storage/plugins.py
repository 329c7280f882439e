"""Plugins from other packages, found by entry points and imported on first use."""

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

from draftstore.errors import MissingPluginError


def load_plugin(group: str, name: str, what: str) -> Callable[..., Any]:
    """Load the object of an entry point, called `what` in the MissingPluginError if there is none."""
    for entry_point in entry_points(group=group, name=name):
        try:
            loaded: Callable[..., Any] = entry_point.load()
        except ImportError as error:
            raise MissingPluginError(
                f"{what} needs a package that is not installed ({error}): install draftstore-server (`make wheels`)"
            ) from None
        return loaded
    raise MissingPluginError(f"{what} is not installed here: install draftstore-server (`make wheels`)")
