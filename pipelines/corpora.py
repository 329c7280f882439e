"""Corpus, name and tokenizer of a flow; the defaults are a demonstration that works on every machine."""

from pathlib import Path, PurePosixPath

from draftstore.errors import BuildError
from draftstore.quickstart import Source, default_folders, find_sources, quickstart_tokenizer, write_corpus
from draftstore.text.tokenizer import TextTokenizer, load_tokenizer
from pipelines.parameters import Corpus

DEMO = "demo"
"""Name and release of what is built from the demonstration corpus."""
LEFT_OUT = frozenset({"test", "tests", "idle_test", "lib2to3", "site-packages"})


def resolve_name(name: str | None, *, demo: bool) -> str:
    """Return the name of a store: the given one, or else that of the demonstration.

    Args:
        name: name from the parameters.
        demo: whether the store is built from the demonstration corpus.

    Raises:
        BuildError: none is given for texts of one's own.
    """
    if name is None and not demo:
        raise BuildError("a store of your own texts needs a name: --param name=chat")
    return name or DEMO


def demo_path(home: Path) -> Path:
    """Return the file of the demonstration corpus."""
    return home / "corpora" / "python-standard-library.jsonl"


def resolve_corpus(corpus: Corpus, home: Path) -> Corpus:
    """Return a corpus with named files: the given one, or else the source of Python's standard library.

    That source is collected in one file under `home`, rewritten only if it changed, so that a killed build can resume.

    Args:
        corpus: corpus from the parameters.
        home: data folder.

    Raises:
        CorpusError: no Python source on this machine.
    """
    if corpus.paths:
        return corpus
    path = demo_path(home)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_corpus(path, _library_sources())
    return corpus.model_copy(update={"paths": [path]})


def _library_sources() -> list[Source]:
    """Return the modules of the standard library, without its tests."""
    sources = find_sources(default_folders()[:1])
    return [source for source in sources if not LEFT_OUT & set(PurePosixPath(source.name).parts)]


def resolve_tokenizer(tokenizer: str | None, home: Path) -> TextTokenizer:
    """Load the named tokenizer, or else the quickstart's: from an installed package, or trained here.

    Args:
        tokenizer: a folder with `tokenizer.json`, that file, or a name on the Hugging Face hub.
        home: data folder, for a trained tokenizer.

    Raises:
        TokenizerError: it cannot be loaded.
    """
    if tokenizer:
        return load_tokenizer(tokenizer)
    folder = home / "corpora"
    folder.mkdir(parents=True, exist_ok=True)
    return quickstart_tokenizer(folder, _library_sources())[0]
