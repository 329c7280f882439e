"""The manifest: the description of a store directory, checked before its files are trusted.

It is written last, before the directory is renamed to its final name: a directory with a manifest is a finished store.
Opening checks versions, identities and file sizes (milliseconds at any size); `verify_files` reads every byte;
`WatchedFiles` notices that the files of an open store shrink: a read past the end of a mapped file would kill the
process.
"""

import dataclasses
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, StrictInt, TypeAdapter
from pydantic.dataclasses import dataclass

from draftstore.errors import StoreError, TokenizerError
from draftstore.storage.files import AnyText, hash_file, json_text, load_json, write_atomic
from draftstore.storage.report import OnProgress, ignore

FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"
TOKENIZER_FOLDER = "tokenizer"
"""Folder of the tokenizer in a store."""
COUNTS = ("documents", "entries", "tokens")
FORBID = ConfigDict(extra="forbid")


@dataclass(frozen=True, config=FORBID)
class TokenizerIdentity:
    """Identity of a tokenizer: a hash of its vocabulary and merges, and a display name."""

    name: AnyText
    fingerprint: str


@dataclass(frozen=True, config=FORBID)
class FileEntry:
    """Size in bytes and SHA-256 of one file of a store."""

    size: StrictInt
    sha256: str

    @classmethod
    def of(cls, path: Path) -> "FileEntry":
        """Measure a file on disk."""
        return cls(size=path.stat().st_size, sha256=hash_file(path))


def _inside(name: str) -> str:
    if name.startswith("/") or ".." in name.split("/"):
        raise ValueError(f"the file {name!r} is outside the store")
    return name


def _with_required(counts: dict[str, int]) -> dict[str, int]:
    if missing := set(COUNTS) - counts.keys():
        raise ValueError(f"the count {min(missing)!r} is missing")
    return counts


@dataclass(frozen=True, config=FORBID)
class Manifest:
    """Everything that a reader must know before mapping a store's files."""

    kind: str  # `rest`, `crest`, `dresd`, `recycling`, or `tokens` for token shards
    name: AnyText
    created: str  # UTC time in ISO 8601
    vocab_size: Annotated[StrictInt, Field(ge=1)]
    token_dtype: Annotated[
        str, Field(pattern="^uint(16|32)$")
    ]  # of token ids on disk, which are below `vocab_size`
    tokenizer: TokenizerIdentity
    parameters: dict[str, Any]
    corpus: dict[str, Any]  # fingerprint, sources, and what was skipped
    counts: Annotated[dict[str, StrictInt], AfterValidator(_with_required)]
    files: dict[Annotated[AnyText, AfterValidator(_inside)], FileEntry]  # all others, by relative path
    target_model: AnyText | None = None  # id of the LLM that the store is bound to
    format_version: Literal[1] = 1

    @property
    def size(self) -> int:
        """Bytes of all files except the manifest."""
        return sum(entry.size for entry in self.files.values())

    @property
    def index_size(self) -> int:
        """Bytes of all files except the manifest and the copy of the tokenizer."""
        prefix = f"{TOKENIZER_FOLDER}/"
        return sum(entry.size for name, entry in self.files.items() if not name.startswith(prefix))

    def to_json(self) -> str:
        """Return the manifest as JSON text with sorted keys: equal manifests give equal bytes."""
        return json_text(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str, where: Path) -> "Manifest":
        """Parse `to_json`'s output; StoreError, naming the file `where`, if it is not a manifest of this version."""
        try:
            return load_json(text, MANIFESTS)
        except ValueError as error:
            raise StoreError(
                f"{where} is not a manifest of version {FORMAT_VERSION} ({error}): the store is damaged, "
                "or another draftstore wrote it: build it again"
            ) from None

    def require_model(self, found: str | None, where: Path, held: str, advice: str) -> None:
        """Refuse a model other than the store's; `held` names its data in the error. None is always accepted."""
        if found is not None and found != self.target_model:
            raise StoreError(
                f"{where} holds {held} of the model {self.target_model!r}, found {found!r}: {advice}"
            )

    def require_tokenizer(self, found: TokenizerIdentity, where: Path) -> None:
        """Raise a TokenizerError for a tokenizer other than the store's."""
        if found.fingerprint != self.tokenizer.fingerprint:
            raise TokenizerError(
                f"{where} was built with tokenizer {self.tokenizer.name!r} (fingerprint "
                f"{self.tokenizer.fingerprint[:12]}), found {found.name!r} ({found.fingerprint[:12]}): "
                "pass the tokenizer of the store, or build a store for this one"
            )


def model_name(name_or_path: str | Path) -> str:
    """Return the id of a model: the name of its directory, of its file without the suffix, or its hub name."""
    path = Path(name_or_path)
    if path.is_file():
        return path.stem
    return path.resolve().name if path.is_dir() else str(name_or_path)


MANIFESTS = TypeAdapter(Manifest)


def save_manifest(directory: Path, manifest: Manifest) -> None:
    """Write `manifest.json` into a directory whose other files are complete."""
    write_atomic(directory / MANIFEST_NAME, manifest.to_json().encode())


def load_manifest(directory: Path, kind: str | None = None) -> Manifest:
    """Read a store's manifest, and check its kind, if one is given, and the presence and size of every file."""
    manifest = read_manifest(directory)
    if kind is not None and manifest.kind != kind:
        raise StoreError(f"{directory} is a store of kind {manifest.kind!r}, expected {kind!r}")
    for problem in size_problems(directory, manifest.files):
        raise StoreError(f"{problem}: the store is damaged, build it again")
    return manifest


def read_manifest(directory: Path) -> Manifest:
    """Read a store's manifest like `load_manifest`, without checking the other files."""
    path = directory / MANIFEST_NAME
    try:
        return Manifest.from_json(path.read_text(encoding="utf-8"), path)
    except (FileNotFoundError, NotADirectoryError):
        raise _no_store(directory) from None
    except UnicodeDecodeError as error:
        raise StoreError(
            f"{path} is not UTF-8 text ({error}): the store is damaged, build it again"
        ) from None


def manifest_digest(directory: Path) -> str:
    """Return the SHA-256 of a store's manifest: the identity of the store."""
    try:
        return hash_file(directory / MANIFEST_NAME)
    except (FileNotFoundError, NotADirectoryError):
        raise _no_store(directory) from None


def _no_store(directory: Path) -> StoreError:
    if directory.is_dir():
        why = f"it has no {MANIFEST_NAME} (is the build unfinished?)"
    else:
        why = "it is a file" if directory.exists() else "there is no such directory"
    return StoreError(f"{directory} is not a store: {why}")


def size_problems(directory: Path, files: Mapping[str, FileEntry]) -> Iterator[str]:
    """Yield one sentence per file that is missing or has the wrong size."""
    for name, entry in sorted(files.items()):
        path = directory / name
        if not path.is_file():
            yield f"{path} is missing"
        elif path.stat().st_size != entry.size:
            yield f"{path} has {path.stat().st_size:,} bytes, expected {entry.size:,}"


def verify_files(directory: Path, manifest: Manifest, on_bytes: OnProgress = ignore) -> list[str]:
    """Compare every file of a store with its recorded hash; return one sentence per problem."""
    problems = list(size_problems(directory, manifest.files))
    if problems:
        return problems
    done = 0
    for name, entry in sorted(manifest.files.items()):
        found = hash_file(directory / name)
        if found != entry.sha256:
            problems.append(
                f"{directory / name} has SHA-256 {found}, expected {entry.sha256}: "
                f"the file or its entry in {MANIFEST_NAME} is damaged"
            )
        done += entry.size
        on_bytes(done, manifest.size)
    return problems


class WatchedFiles:
    """The mapped files of an open store."""

    def __init__(self, store: Path, manifest: Manifest) -> None:
        """Open the files of a store that has just been mapped; OSError if one cannot be opened."""
        self.damage: str | None = None  # why the store must no longer be read, as found by `check`
        with ExitStack() as opened:
            self._files = [
                (opened.enter_context((store / name).open("rb")), entry.size)
                for name, entry in manifest.files.items()
                if not name.startswith(TOKENIZER_FOLDER)  # the others are mapped
            ]
            self._opened = opened.pop_all()

    def check(self) -> str | None:
        """Return why the store must no longer be read; None while its files are intact. Call it before each read."""
        for file, size in self._files:
            if os.lseek(file.fileno(), 0, os.SEEK_END) < size:  # a quarter of the time of fstat
                self.damage = (
                    f"{file.name} was truncated: stores are replaced, never written to; build it again"
                )
        return self.damage

    def close(self) -> None:
        """Close the files."""
        self._files.clear()
        self._opened.close()
