"""The files of an open store, which must stay whole: a read behind the end of a mapped file would end the process."""

import os
from contextlib import ExitStack
from pathlib import Path

from draftstore.storage.manifest import TOKENIZER_FOLDER, Manifest


class WatchedFiles:
    """The mapped files of an open store.

    Attributes:
        damage: why the store must not be read any more, as `check` found it; None while its files are whole.
    """

    def __init__(self, store: Path, manifest: Manifest) -> None:
        """Open the files of a store that was just mapped; OSError if one cannot be opened."""
        self.damage: str | None = None
        with ExitStack() as opened:
            self._files = [
                (opened.enter_context((store / name).open("rb")), entry.size)
                for name, entry in manifest.files.items()
                if not name.startswith(TOKENIZER_FOLDER)  # the others are mapped
            ]
            self._opened = opened.pop_all()

    def check(self) -> str | None:
        """Return why the store must not be read any more; None while its files are whole. Call it before each read."""
        for file, size in self._files:
            if os.lseek(file.fileno(), 0, os.SEEK_END) < size:  # a quarter of the time of fstat
                self.damage = f"{file.name} was cut: stores are replaced, never written to; build it again"
        return self.damage

    def close(self) -> None:
        """Close the files."""
        self._files.clear()
        self._opened.close()
