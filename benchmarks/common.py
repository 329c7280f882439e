"""Shared parts of the benchmark programs: data folders, stores built once, recordings, contexts."""

import argparse
import dataclasses
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache, cached_property
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from benchmarks.measure import progress
from draftstore.decoding.replay import Recording, read_recordings, replay
from draftstore.drafting.drafter import Drafter
from draftstore.errors import DraftstoreError
from draftstore.search.suffix import SuffixIndex
from draftstore.storage.files import write_json
from draftstore.storage.report import ReadReport
from draftstore.stores.rest.build import RestOptions, build_rest
from draftstore.stores.rest.store import RestStore
from draftstore.text.corpus import find_files, read_files
from draftstore.text.records import Document, read_json_records
from draftstore.text.tokenizer import TextTokenizer, load_tokenizer
from draftstore.text.tokens import sentinel

DATA_VARIABLE = "DRAFTSTORE_TEST_DATA"
RESULTS = Path("benchmarks/results")
TOKENIZER = "llama2"
CODE_LIST = "code_packages_small.txt"
STRATEGY_NAMES = ("longest", "backoff")
SEED = 20240601
AUTHORS_TOKEN_BYTES = 6
"""Bytes per token in the REST authors' store: its id, and a suffix of four bytes."""
PART_OF_REST = 13.5
"""The CREST paper compares its store with a REST store larger by this factor."""

Item = TypeVar("Item")


@dataclasses.dataclass(frozen=True)
class Source:
    """Text that a store is built from.

    Attributes:
        name: name of the store.
        files: files under corpora/ of the data folder; empty: the Python code of `CODE_LIST`.
        tokens: maximum tokens of the documents, the first of which are used; None: all.
        every: use only every nth document.
    """

    name: str
    files: tuple[str, ...] = ()
    tokens: int | None = None
    every: int = 1


CHAT = Source("chat_sharegpt", ("chat_sharegpt.jsonl.zst",))
CODE = Source("code_packages_small")
SIXTH = Source("chat_sharegpt_sixth", CHAT.files, tokens=4_500_000, every=6)
"""As much as libraries can hold that keep it in memory."""
TINY = Source("chat_sharegpt_500k", CHAT.files, tokens=500_000)
"""For smoke tests of a program."""


@dataclasses.dataclass(frozen=True)
class RecordingSet:
    """Recorded outputs: a file under replays/ of the data folder, and the model that wrote them."""

    file: str
    model: str | None = None


VICUNA = RecordingSet("alpaca_eval.jsonl.zst", "vicuna-7b-v1.5")


class Documents(NamedTuple):
    """A corpus as token ids below `vocab_size`: document i is `tokens[offsets[i]:offsets[i + 1]]`."""

    tokens: NDArray[np.int32]
    offsets: NDArray[np.int64]
    vocab_size: int


@dataclasses.dataclass
class Workspace:
    """Folders that a benchmark reads and writes.

    Attributes:
        data: folder with corpora/, replays/ and tokenizers/.
        work: folder of built stores, reused by the next run.
        out: folder of results.
        vocabulary: name of the tokenizer of all stores and recordings.
    """

    data: Path
    work: Path
    out: Path
    vocabulary: str = TOKENIZER

    @cached_property
    def tokenizer(self) -> TextTokenizer:
        """The tokenizer of all stores here."""
        return load_tokenizer(self.data / "tokenizers" / self.vocabulary, name=self.vocabulary)

    def inputs(self, source: Source) -> tuple[Path, ...]:
        """Return the corpus files of a source; generated ones are made once."""
        files = tuple(self.data / "corpora" / file for file in source.files) or (self._code_corpus(),)
        return files if source.tokens is None else (self._first_documents(source, files, source.tokens),)

    def _first_documents(self, source: Source, files: Sequence[Path], tokens: int) -> Path:
        """Write the first documents of some files to one file."""
        path = self.work / "corpora" / f"{source.name}.jsonl"
        if not path.exists():
            render = self.tokenizer.render_document
            documents = islice(
                read_files(find_files(files), render=render, report=ReadReport()), 0, None, source.every
            )
            _write_corpus(path, _within(documents, self.tokenizer, tokens))
        return path

    def _code_corpus(self) -> Path:
        """Return a JSON Lines file with the distinct Python files of the packages in `CODE_LIST`."""
        path = self.work / "corpora" / f"{CODE.name}.jsonl"
        if not path.exists():
            lines = (self.data / CODE_LIST).read_text(encoding="utf-8").splitlines()
            _write_corpus(path, python_files(download_wheels(lines, self.work / "wheels")))
        return path

    def store_path(self, source: Source) -> Path:
        """Return the path of a source's store, which need not exist yet."""
        return self.work / "stores" / source.name

    def store(self, source: Source) -> RestStore:
        """Open the store of a source, building it if necessary."""
        progress(f"store {source.name}")
        options = RestOptions(corpus=self.inputs(source), name=source.name)
        return RestStore.open(build_rest(options, self.tokenizer, self.store_path(source)).path)

    def recordings(self, recorded: RecordingSet) -> list[Recording]:
        """Read recorded outputs as token ids."""
        return list(
            read_recordings(self.data / "replays" / recorded.file, self.tokenizer, model=recorded.model)
        )


class Notes:
    """Figures cached in the work folder for interrupted runs; valid while draftstore's code is unchanged."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder

    def take(self, place: Mapping[str, Any], measure: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
        """Return place and figures of a measurement, from an earlier run or from `measure`."""
        identity = json.dumps([place, _code_digest()], sort_keys=True)
        path = self._folder / f"{hashlib.sha256(identity.encode()).hexdigest()[:16]}.json"
        if not path.exists():
            progress(", ".join(str(value) for value in place.values()))
            write_json(path, {**place, **measure()})
        noted: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return noted


@cache
def _code_digest() -> str:
    """Return a digest of the code of draftstore and of the benchmarks that use `Notes`."""
    root = Path(__file__).parent.parent
    folders = (root / "draftstore", *(root / "benchmarks" / name for name in ("agents", "quality", "stores")))
    files = [file for folder in folders for file in sorted(folder.rglob("*.py"))]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of all benchmark programs."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--data", type=Path, default=os.environ.get(DATA_VARIABLE),
        help=f"folder with corpora/, replays/ and tokenizers/ (default: ${DATA_VARIABLE})",
    )  # fmt: skip
    parser.add_argument(
        "--work", type=Path, help="folder for built stores, reused where present (default: temporary)"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for results (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="small stores, few rows: a smoke test")


def chosen(parser: argparse.ArgumentParser, text: str | None, known: Iterable[str]) -> list[str]:
    """Return the names in a comma-separated list, or all without one; exit if a name is unknown."""
    names = [name.strip() for name in text.split(",")] if text else list(known)
    if unknown := set(names) - set(known):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; choose from {', '.join(known)}")
    return names


@contextmanager
def open_workspace(args: argparse.Namespace) -> Iterator[Workspace]:
    """Check the folders of the command line; a temporary working folder is removed at the end.

    Raises:
        SystemExit: there is no data folder, or draftstore raised an error.
    """
    if args.data is None or not (args.data / "tokenizers" / TOKENIZER).is_dir():
        raise SystemExit(
            f"no data at {args.data}: pass --data or set {DATA_VARIABLE} to the folder that holds "
            f"corpora/, replays/ and tokenizers/{TOKENIZER}/"
        )
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="draftstore-bench-") as temporary:
        work = (args.work or Path(temporary)).resolve()
        (work / "corpora").mkdir(parents=True, exist_ok=True)
        try:
            yield Workspace(args.data.resolve(), work, args.out)
        except DraftstoreError as error:
            raise SystemExit(f"error: {error}") from error


def alpaca_questions(space: Workspace) -> list[str]:
    """Return the different prompts of AlpacaEval, in their order."""
    records = read_json_records(space.data / "replays" / VICUNA.file)
    return list(dict.fromkeys(record["prompt"][0]["content"] for _, record in records))


def evenly(items: Sequence[Item], count: int) -> list[Item]:
    """Choose `count` evenly spaced items, always the same."""
    places = np.linspace(0, len(items) - 1, min(count, len(items))).astype(int)
    return [items[place] for place in places]


def accepted_length(drafter: Drafter, recordings: Sequence[Recording], budget: int) -> dict[str, Any]:
    """Replay recordings and return the figures that do not depend on the machine."""
    summary = replay(drafter, recordings, budget=budget).summary()
    return {key: summary[key] for key in ("accepted_length", "nodes_mean", "miss_rate", "passes")}


def draw_contexts(recordings: Sequence[Recording], count: int, size: int) -> NDArray[np.int32]:
    """Return int32 [count, size]: the last tokens at random places in the outputs, padded with -1."""
    rng = np.random.default_rng(SEED)
    long_enough = [recording for recording in recordings if len(recording.output) > 1]
    contexts = np.full((count, size), -1, np.int32)
    for i in range(count):
        recording = long_enough[i % len(long_enough)]
        place = int(rng.integers(1, len(recording.output)))
        tail = np.concatenate([recording.prompt, recording.output[:place]])[-size:]
        contexts[i, size - len(tail) :] = tail
    return contexts


def split_documents(index: SuffixIndex) -> Documents:
    """Return the documents of a store without sentinels."""
    tokens = np.asarray(index.tokens)
    ends = np.flatnonzero(tokens == sentinel(tokens.dtype))
    offsets = np.concatenate(([0], ends - np.arange(len(ends))))
    return Documents(np.delete(tokens, ends).astype(np.int32), offsets, index.vocab_size)


def _within(documents: Iterator[Document], tokenizer: TextTokenizer, tokens: int) -> Iterator[Document]:
    """Yield the first documents, of at most `tokens` tokens in total."""
    left = tokens
    while batch := list(islice(documents, 64)):
        encoded = tokenizer.encode_documents([document.text for document in batch])
        for document, ids in zip(batch, encoded, strict=True):
            left -= len(ids)
            if left < 0:
                return
            yield document


def _write_corpus(path: Path, documents: Iterator[Document]) -> None:
    """Write documents as JSON Lines."""
    write_records(path, ({"id": document.id, "text": document.text} for document in documents))


def write_records(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Write records as JSON Lines; the file appears once it is complete."""
    unfinished = path.with_suffix(".partial")
    with unfinished.open("w", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps(record) + "\n")
    unfinished.rename(path)


def download_wheels(requirements: Sequence[str], folder: Path) -> list[Path]:
    """Have pip fetch the wheels of pinned packages, one per line, unless present; return the files in order."""
    pinned = [*filter(None, (line.split("#")[0].strip() for line in requirements))]
    if len(list(folder.glob("*.whl"))) < len(pinned):
        progress(f"download {len(pinned)} wheels")
        command = ["download", "--no-deps", "--only-binary=:all:", *pinned, "-d", str(folder)]
        subprocess.run([sys.executable, "-m", "pip", *command], check=True, stdout=sys.stderr)
    return sorted(folder.glob("*.whl"))


def python_files(wheels: Sequence[Path]) -> Iterator[Document]:
    """Yield the distinct UTF-8 Python files of wheels."""
    seen = set[bytes]()
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            for name in sorted(archive.namelist()):
                data = archive.read(name) if name.endswith(".py") else b""
                digest = hashlib.sha256(data).digest()
                if data.strip() and digest not in seen:
                    seen.add(digest)
                    with suppress(UnicodeDecodeError):
                        yield Document.plain(f"{wheel.name}/{name}", data.decode("utf-8"))
