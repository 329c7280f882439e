"""Corpus, name and tokenizer of a flow; the defaults are a demonstration that runs on every machine."""

from pathlib import Path, PurePosixPath

from draftstore.errors import BuildError
from draftstore.text.python_source import (
    Source,
    default_folders,
    find_sources,
    quickstart_tokenizer,
    write_corpus,
)
from draftstore.text.tokenizer import TextTokenizer, load_tokenizer
from pipelines.parameters import Corpus

DEMO = "demo"
"""Name and release of the stores built from the demonstration corpus."""
DEMO_FILE = "python-standard-library.jsonl"
EXCLUDED = frozenset({"test", "tests", "idle_test", "lib2to3", "site-packages"})


def resolve_name(name: str | None, *, demo: bool) -> str:
    """Return the name of a store: the given one, else `demo`, but only for the demonstration corpus."""
    if name is None and not demo:
        raise BuildError(
            "a store of your own texts needs a name: --param name=chat, or a collection (`draftstore corpus add chat "
            "PATH`), whose name the flow rebuild uses"
        )
    return name or DEMO


def resolve_corpus(corpus: Corpus, home: Path) -> Corpus:
    """Return a corpus with named files: the given one, else the source of Python's standard library.

    That source is one file under `home`, written again only if it changed, so that a killed build can resume.
    """
    if corpus.paths:
        return corpus
    path = home / "corpora" / DEMO_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    write_corpus(path, _library_sources())
    return corpus.model_copy(update={"paths": [path]})


def _library_sources() -> list[Source]:
    """Return the modules of the standard library, without its tests."""
    sources = find_sources(default_folders()[:1])
    return [source for source in sources if not EXCLUDED & set(PurePosixPath(source.name).parts)]


def resolve_tokenizer(tokenizer: str | None, home: Path) -> TextTokenizer:
    """Load the named tokenizer, else the quickstart's: from an installed package, or trained under `home`."""
    if tokenizer:
        return load_tokenizer(tokenizer)
    folder = home / "corpora"
    folder.mkdir(parents=True, exist_ok=True)
    return quickstart_tokenizer(folder, _library_sources())[0]
