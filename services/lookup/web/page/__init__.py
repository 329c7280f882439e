"""The page for people: one template, one style sheet and a small script, read once from this folder."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from draftstore import __version__
from services.lookup.limits import SHARED_BUDGET
from services.lookup.web.messages import ReleaseEntry

_FOLDER = Path(__file__).parent
_MEDIA = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


class Asset(NamedTuple):
    """A file that the page loads."""

    data: bytes
    media: str
    tag: str


def _load_assets() -> dict[str, Asset]:
    """Read all files that the page loads, by name."""
    assets = {}
    for path in sorted((_FOLDER / "static").iterdir()):
        data = path.read_bytes()
        tag = f'"{hashlib.sha256(data).hexdigest()[:16]}"'
        assets[path.name] = Asset(data, _MEDIA[path.suffix], tag)
    return assets


ASSETS = _load_assets()
_TEMPLATE = Environment(
    loader=FileSystemLoader(_FOLDER / "templates"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
).get_template("index.html")


def render(
    releases: Sequence[ReleaseEntry], wants_token: bool, notice: str = "", max_budget: int = SHARED_BUDGET
) -> str:
    """Return the page.

    Args:
        releases: releases visible without a token.
        wants_token: whether a token is needed to see any.
        notice: a problem, in one sentence; empty if there is none.
        max_budget: nodes of a draft.
    """
    return _TEMPLATE.render(
        releases=releases, wants_token=wants_token, notice=notice, max_budget=max_budget, version=__version__
    )
