"""What the processes of a log share, in files beside its segments: its vocabulary, its limits, its take-downs."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from draftstore.errors import DraftstoreError, EarlierVersionError
from draftstore.storage.files import replacing
from draftstore.storage.locks import lock
from draftstore.text.digests import IDENTITY

MODE = 0o600
FORMAT = 2
"""Version of the segments; in version 1, a record had no hash of its prompt."""
T = TypeVar("T")
_WRITTEN = {"identity": IDENTITY, "format": FORMAT}


class Vocabulary(NamedTuple):
    """The vocabulary of a live store: its size and the tokenizer's fingerprint."""

    size: int
    fingerprint: str


class Settings(NamedTuple):
    """What the processes of a log share: the vocabulary of its documents, and the largest memory it is kept for.

    Documents of versions before `least` are forgotten.
    """

    vocabulary: Vocabulary | None = None
    tokens: int = 0
    least: int = 0


def settings_of(folder: Path) -> Settings:
    """Return the settings of a log; see `load` for errors."""

    def made(found: dict[str, Any]) -> Settings:
        vocabulary = Vocabulary(int(found["size"]), str(found["fingerprint"])) if "size" in found else None
        return Settings(vocabulary, int(found.get("tokens", 0)), int(found.get("least", 0)))

    return load(folder, "live.json", made, "remove the folder") or Settings()


def agree(folder: Path, vocabulary: Vocabulary) -> Vocabulary:
    """Return the vocabulary of a log, which is set by the first caller."""
    changed = change(folder, lambda found: found._replace(vocabulary=found.vocabulary or vocabulary))
    return changed.vocabulary or vocabulary


def enlarge(folder: Path, tokens: int) -> None:
    """Keep a log at least for a memory of `tokens`; this never deletes anything."""
    if settings_of(folder).tokens < tokens:
        change(folder, lambda found: found._replace(tokens=max(found.tokens, tokens)))


def change(folder: Path, make: Callable[[Settings], Settings]) -> Settings:
    """Change the settings of a log, under its lock; return the new ones."""
    with lock(folder):
        before = settings_of(folder)
        after = make(before)
        if after != before:
            vocabulary = after.vocabulary._asdict() if after.vocabulary else {}
            save(folder / "live.json", {**vocabulary, "tokens": after.tokens, "least": after.least})
    return after


def save(path: Path, fields: dict[str, Any]) -> None:
    """Write what `load` reads, atomically, for the owner of the log, even if root does."""
    with replacing(path, MODE) as temporary:
        temporary.write_text(json.dumps(fields | _WRITTEN), encoding="utf-8")
        if os.geteuid() == 0:
            owner = path.parent.stat()
            os.chown(temporary, owner.st_uid, owner.st_gid)


def load(folder: Path, name: str, make: Callable[[dict[str, Any]], T], advice: str) -> T | None:
    """Return what a file of a log says; None if there is no such file.

    EarlierVersionError if an earlier version wrote it; DraftstoreError, with advice, if it cannot be read.
    """
    try:
        found = json.loads((folder / name).read_text(encoding="utf-8"))
        if _WRITTEN.items() <= found.items():
            return make(found)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DraftstoreError(f"{folder / name} cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, KeyError) as error:
        raise DraftstoreError(f"{folder / name} cannot be read ({error}): {advice}") from None
    raise EarlierVersionError(
        f"the live log {folder} was written by an earlier version: move the folder away, and a new log begins; "
        "docs/operations.md, Upgrade, has the steps"
    )
