"""The pages of the documentation, and the parts of them that can be run."""

import re
from typing import NamedTuple

from tests import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = (
    "README.md",
    *dict.fromkeys(re.findall(r"\]\((docs/[\w/-]+\.md)\)", README.partition("## Read on")[2])),
)
"""In the order a reader goes, that of the README's table: a command may use what one before it left."""


class Page(NamedTuple):
    """What can be run of a page.

    Attributes:
        name: path in the repository.
        text: all of it.
        commands: command lines of `draftstore`, without that word.
        services: those of them that start the lookup service in the background, without `&`.
        requests: command lines of `curl`.
        blocks: Python examples.
        shell: blocks of shell commands to paste.
    """

    name: str
    text: str
    commands: list[str]
    services: list[str]
    requests: list[str]
    blocks: list[str]
    shell: list[str]


def read_page(name: str) -> Page:
    """Read a page of the repository."""
    text = (ROOT / name).read_text(encoding="utf-8")
    return Page(
        name,
        text,
        commands=re.findall(r"^\$ (?:\.venv/bin/)?draftstore (.+)$", text, re.MULTILINE),
        services=re.findall(r"^\$ draftstore (serve .+) &$", text, re.MULTILINE),
        requests=re.findall(r"^\$ (curl .+)$", text, re.MULTILINE),
        blocks=re.findall(r"^```python\n(.+?)^```", text, re.MULTILINE | re.DOTALL),
        shell=re.findall(r"^```sh\n(.+?)^```", text, re.MULTILINE | re.DOTALL),
    )


def links_of(text: str) -> list[str]:
    """Return the links of a page into the repository: of the form `[text](link)`, and of pictures."""
    found: list[str] = re.findall(r"\]\((?!https?:)([^)]+)\)", text)
    return found + re.findall(r'<img src="(?!https?:)([^"]+)"', text)


def anchors_of(text: str) -> set[str]:
    """Return the names of a page's headings as links have them."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
