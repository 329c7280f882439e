"""The files of an open store, which must not shrink: a read past the end of a mapped file would kill the process."""

import os
from contextlib import ExitStack
from pathlib import Path

from draftstore.storage.manifest import TOKENIZER_FOLDER, Manifest


class WatchedFiles:
    """The mapped files of an open store.

    Attributes:
        damage: why the store must no longer be read, as found by `check`; None while its files are intact.
    """

    def __init__(self, store: Path, manifest: Manifest) -> None:
        """Open the files of a store that has just been mapped; OSError if one cannot be opened."""
        self.damage: str | None = None
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
