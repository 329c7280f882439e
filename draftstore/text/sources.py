"""The sources of a collection, and the files that each currently denotes."""

import dataclasses
import glob as globbing
import hashlib
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from draftstore.errors import CorpusError, DraftstoreError
from draftstore.storage.report import ReadReport
from draftstore.storage.streams import COMPRESSION_SUFFIXES
from draftstore.text.chat import Message
from draftstore.text.corpus import SOURCE_PATTERNS, find_files
from draftstore.text.fragments import Fragment
from draftstore.text.records import CorpusFile, Read, Render, kind_of_file, read_documents

GLOB_SIGNS = re.compile(r"[*?\[]")


def no_template(_messages: Sequence[Message]) -> str:
    """Raise a DraftstoreError, which is no bad record: the text of a conversation depends on a chat template."""
    raise DraftstoreError(
        "there are conversations, whose text depends on the model's chat template: name the tokenizer of the "
        "collection, `draftstore corpus add NAME --tokenizer T`"
    )


@dataclasses.dataclass(frozen=True)
class Source:
    """One source of a collection, on this machine.

    Attributes:
        number: identifies it in scans, regardless of sources added or removed.
        place: a file, a folder, or a path pattern such as `/data/*.jsonl`.
        log: whether it is a log, which may not exist yet, is rotated, and grows during reading.
        column: key or column of the text in records.
        glob: patterns of the files to read in a folder.
        strict: whether to stop at the first bad record.
        allow_truncated: whether to continue after a truncated file.
        render: turns a conversation into text.
        find: for a log that is not text, returns its files for `read`, the oldest first.
        template: identity of `render` or `read`.
        refused: documents that contain one of these texts are never wanted.
        added: unix seconds; no document was first seen earlier.
    """

    number: int
    place: str
    log: bool = False
    column: str = "text"
    glob: tuple[str, ...] = SOURCE_PATTERNS
    strict: bool = False
    allow_truncated: bool = False
    render: Render = dataclasses.field(default=no_template, compare=False)
    find: Callable[[], list[CorpusFile]] | None = dataclasses.field(default=None, compare=False)
    read: Read = dataclasses.field(default=read_documents, compare=False)
    template: str = ""
    refused: tuple[Fragment, ...] = ()
    added: int = 0

    @property
    def reading(self) -> str:
        """Identity of everything besides the file that determines its documents."""
        fragments = sorted(map(dataclasses.astuple, self.refused))
        deciding = [self.column, self.strict, self.allow_truncated, self.template, fragments]
        return hashlib.sha256(json.dumps(deciding).encode()).hexdigest()[:16]

    def files(self, report: ReadReport | None = None) -> list[CorpusFile]:
        """Return its files, always in the same order, those of a log from oldest to newest; see `find_files`.

        Raises:
            CorpusError: there are none and it is not a log, or one is of an unknown kind.
        """
        if self.find:
            return self.find()
        if self.log:
            return [CorpusFile(path, path.name, kind_of_file(path)) for path in log_files(Path(self.place))]
        paths, within = [Path(self.place)], None
        if not paths[0].exists() and (sign := GLOB_SIGNS.search(self.place)):
            paths = [Path(found) for found in sorted(globbing.glob(self.place, recursive=True))]  # noqa: PTH207
            within = Path(self.place[: sign.start()].rpartition("/")[0] or "/")
            if not paths:
                raise CorpusError(f"no file matches {self.place}: the disk may not be mounted")
        return find_files(paths, self.glob, report or ReadReport(), within)


def log_files(path: Path) -> list[Path]:
    """Return the existing files of a response log: `answers.2.jsonl`, `answers.1.jsonl`, `answers.jsonl`."""
    packed = "|".join(map(re.escape, COMPRESSION_SUFFIXES))
    name = re.compile(rf"{re.escape(path.stem)}\.(\d+){re.escape(path.suffix)}(?:{packed})?")
    beside = path.parent.iterdir() if path.parent.is_dir() else iter(())
    rotated = [(int(found[1]), other) for other in beside if (found := name.fullmatch(other.name))]
    older = [other for _, other in sorted(rotated, key=lambda item: (-item[0], item[1].name))]
    return [*older, *([path] if path.exists() else [])]
