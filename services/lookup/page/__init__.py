"""The web page: one document, one style sheet and a small script, read once from this folder."""

from dataclasses import dataclass
from pathlib import Path

from draftstore import __version__

_FOLDER = Path(__file__).parent
_MEDIA = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
BUDGET = 32
"""Initial limit on the nodes of a draft."""


@dataclass(frozen=True)
class Asset:
    """A file that the page loads."""

    data: bytes
    media: str


ASSETS = {
    path.name: Asset(path.read_bytes(), _MEDIA[path.suffix])
    for path in sorted((_FOLDER / "static").iterdir())
}


def render(max_budget: int) -> bytes:
    """Return the page of a service with this limit on the nodes of a draft."""
    page = (_FOLDER / "index.html").read_text(encoding="utf-8")
    values = {"version": __version__, "max_budget": max_budget, "budget": min(BUDGET, max_budget)}
    for name, value in values.items():
        page = page.replace(f"{{{{ {name} }}}}", str(value))
    return page.encode()
