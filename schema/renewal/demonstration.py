"""Text and tokenizer of a flow that names none: the source of Python's standard library, on every machine."""

from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from draftstore.text.python_source import (
    Source,
    default_folders,
    find_sources,
    quickstart_tokenizer,
    write_corpus,
)
from draftstore.text.tokenizer import TextTokenizer, load_tokenizer

NAME = "demo"
"""Name and release of the stores built from it."""
FILE = "python-standard-library.jsonl"
EXCLUDED = frozenset({"test", "tests", "idle_test", "lib2to3", "site-packages"})


def write_demonstration(home: Path) -> Path:
    """Return the corpus, a file under `home`; written again only if it changed, so that a killed build can resume."""
    path = _folder(home) / FILE
    write_corpus(path, _library_sources())
    return path


def resolve_tokenizer(tokenizer: str | None, home: Path) -> TextTokenizer:
    """Load the named tokenizer, else the quickstart's: from an installed package, or trained under `home`."""
    return (
        load_tokenizer(tokenizer) if tokenizer else quickstart_tokenizer(_folder(home), _library_sources())[0]
    )


def is_demonstration(sources: Sequence[str]) -> bool:
    """Return True if the only source is the demonstration corpus, in any data folder."""
    return {Path(source).name for source in sources} == {FILE}


def _folder(home: Path) -> Path:
    folder = home / "corpora"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _library_sources() -> list[Source]:
    """Return the modules of the standard library, without its tests."""
    sources = find_sources(default_folders()[:1])
    return [source for source in sources if not EXCLUDED & set(PurePosixPath(source.name).parts)]
