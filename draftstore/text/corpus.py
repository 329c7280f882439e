"""Corpora: files and folders as one stream of documents with stable ids, always in the same order, and their sources.

A bad record is counted and reported with its position; it is an error only with `strict`. A missing path or an unknown
file type is always an error, and so is a truncated file unless explicitly allowed: nobody would notice what is missing
from the store. A link in a folder is followed only if its target is in that folder, too, and no folder is read twice.
Hidden and unfinished files in folders are counted, not read.
"""

import dataclasses
import fnmatch
import glob as globbing
import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from draftstore.errors import CorpusError, DraftstoreError, TruncatedCorpusError
from draftstore.storage.files import file_identity
from draftstore.storage.report import HIDDEN, LINKS, ReadReport, RecordProblem, passed_over_text
from draftstore.storage.streams import COMPRESSION_SUFFIXES
from draftstore.text.chat import Message
from draftstore.text.fragments import Fragment
from draftstore.text.records import (
    ACCEPTED,
    TEXT_SUFFIXES,
    CorpusFile,
    Document,
    Read,
    Render,
    ending_of_name,
    kind_of_file,
    kind_of_name,
    read_documents,
)
from draftstore.text.selecting import TEXTS, RecordOptions

SOURCE_PATTERNS = tuple(f"*{suffix}" for suffix in TEXT_SUFFIXES)
DATA_PATTERNS = (
    *(f"*{kind}{packed}" for kind in (".jsonl", ".ndjson") for packed in ("", *COMPRESSION_SUFFIXES)),
    "*.parquet",
)
"""The files to read in a folder of records; `.json` may be any file of settings."""
SKIPPED_FOLDERS = frozenset({"node_modules", "__pycache__"})
GROUP_BYTES, GROUPS = 1 << 22, 1 << 12
"""Minimum bytes of a group of files, some seconds of work, and about the maximum number of groups."""
GLOB_SIGNS = re.compile(r"[*?\[]")


def read_files(
    files: Iterable[CorpusFile],
    *,
    render: Render,
    report: ReadReport,
    records: RecordOptions = TEXTS,
    strict: bool = False,
    allow_truncated: bool = False,
    read: Read = read_documents,
) -> Iterator[Document]:
    """Stream the documents of files, opened by `read`.

    A record of JSON Lines or Parquet holds its text under the column that `records` name, or a conversation under
    `messages`, `conversations` or that column: a list of turns (`chat.as_messages`), which `render` turns into text; or
    a prompt and its output.
    """
    for file in files:
        before = report.documents + report.filtered
        for item in read(file, records, render):
            if item is None:
                report.filtered += 1
            elif isinstance(item, RecordProblem):
                _refuse(item, strict, allow_truncated)
                report.add_problem(item)
            elif not item.text or item.text.isspace():
                report.empty_documents += 1
            else:
                report.documents += 1
                yield item
        if report.documents + report.filtered == before and file.kind in ("lines", "parquet"):
            report.unread.append(str(file.path))


def group_files(files: Sequence[CorpusFile]) -> list[list[CorpusFile]]:
    """Cut files into groups of neighbours, each of at least `GROUP_BYTES` but for the last, at most `GROUPS`."""
    sizes = [_size(file.path) for file in files]
    least, groups, size = max(GROUP_BYTES, sum(sizes) // GROUPS), list[list[CorpusFile]](), 0
    for file, own in zip(files, sizes, strict=True):
        if not groups or size >= least:
            groups.append([])
            size = 0
        groups[-1].append(file)
        size += own
    return groups


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # reading will say so
        return 0


def _refuse(problem: RecordProblem, strict: bool, allow_truncated: bool) -> None:
    if problem.truncated and not allow_truncated:
        raise TruncatedCorpusError(f"{problem.place}: {problem.reason}; or skip the rest", "allow_truncated")
    if strict and not problem.truncated:
        raise CorpusError(f"{problem.place}: {problem.reason}")


def corpus_fingerprint(
    paths: Sequence[Path],
    *,
    glob: str | Sequence[str] = SOURCE_PATTERNS,
    **options: str | int | bool,
) -> str:
    """Return the identity of a corpus: SHA-256 over its files' paths and contents, and how it is read.

    It decides whether a build can resume or is done.
    """
    files = [
        (str(file.path.resolve()), file.name, file_identity(file.path))
        for file in find_files(paths, glob, ReadReport())
    ]
    return hashlib.sha256(json.dumps([files, options], sort_keys=True).encode()).hexdigest()


def find_files(
    paths: Sequence[Path],
    glob: str | Sequence[str] = SOURCE_PATTERNS,
    report: ReadReport | None = None,
    within: Path | None = None,
) -> list[CorpusFile]:
    """Return the files to read, in order: paths as given, folders sorted by name.

    `report` receives the numbers of data files, links and hidden files in folders that are skipped; `within` is the
    folder where a pattern found the paths, without links out of it and unfinished files. CorpusError if there are no
    files, or one is missing or of an unknown kind.
    """
    if not paths:
        raise CorpusError(f"no corpus given: name {ACCEPTED}")
    patterns = (glob,) if isinstance(glob, str) else tuple(glob)
    absolute = [Path(os.path.abspath(path)) for path in paths]  # noqa: PTH100 (resolve() would follow links)
    root = Path(os.path.commonpath([path if path.is_dir() else path.parent for path in absolute]))
    files: dict[Path, CorpusFile] = {}
    skipped: dict[Path, str] = {}
    for path in absolute:
        if within is not None and not _real(path).is_relative_to(_real(within)):
            skipped[path] = LINKS
            continue
        if within is not None and any(map(_is_unfinished, Path(os.path.relpath(path, within)).parts)):
            skipped[path] = HIDDEN
            continue
        below = _folder_files(path, patterns, skipped) if path.is_dir() else {path: kind_of_file(path)}
        for found, kind in below.items():
            files.setdefault(found, CorpusFile(found, found.relative_to(root).as_posix(), kind))
    if report is not None:
        counts = Counter(reason for path, reason in skipped.items() if path not in files)
        report.passed_over = dict(Counter(report.passed_over) + counts)
    return list(files.values())


def _folder_files(folder: Path, patterns: Sequence[str], all_skipped: dict[Path, str]) -> dict[Path, str]:
    """Return a folder's matching files with their kinds, sorted by relative path; add those skipped, with reasons."""
    found: dict[str, str] = {}
    skipped: dict[Path, str] = {}
    within, walked, links = _real(folder), set[Path](), [folder]
    for link in links:
        for place, folders, names in os.walk(link, onerror=_unreadable):
            below = [Path(place, name) for name in sorted(folders) if name not in SKIPPED_FOLDERS]
            folders.clear()
            if (real := _real(Path(place))) in walked:
                continue
            walked.add(real)
            for path in below:
                if reason := _skipped(path, within):
                    skipped[path] = reason
                elif path.is_symlink():
                    links.append(path)  # last, as it may lead to a folder that has a name of its own
                else:
                    folders.append(path.name)
            for path in (Path(place, name) for name in names):
                relative = path.relative_to(folder).as_posix()
                kind = _matched_kind(relative, patterns)
                if not ((kind or _is_counted(relative, patterns)) and path.is_file()):
                    continue
                if (reason := _skipped(path, within)) or kind is None:
                    skipped[path] = reason or ending_of_name(path.name)
                else:
                    found[relative] = kind
    if not found:
        shown = ", ".join(patterns[:6]) + (", ..." if len(patterns) > 6 else "")
        advice = (
            passed_over_text(Counter(skipped.values())) or "name others with a pattern, such as '*.jsonl.zst'"
        )
        raise CorpusError(f"{folder} has no file that matches {shown}: {advice}")
    all_skipped |= skipped
    return {folder / name: kind for name, kind in sorted(found.items())}


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))  # `resolve` raises for loops


def _unreadable(error: OSError) -> None:
    raise CorpusError(f"{error.filename} cannot be read: {error.strerror}") from None


def _skipped(path: Path, within: Path) -> str | None:
    """Return why a file or folder below another is not read: `HIDDEN`, `LINKS`, or None if it is."""
    if path.name.startswith(".") or _is_unfinished(path.name):
        return HIDDEN
    return None if _real(path).is_relative_to(within) else LINKS


def _is_unfinished(name: str) -> bool:
    """Return True for what jobs of Spark and others leave; `__init__.py` is text."""
    return name == "_temporary" or (name.startswith("_") and kind_of_name(name) in ("lines", "parquet"))


def _matched_kind(name: str, patterns: Sequence[str]) -> str | None:
    """Return the kind of a folder's file under these patterns, or None if it does not match."""
    matching = [pattern for pattern in patterns if _matches(name, pattern)]
    kind = kind_of_name(name)
    if kind in ("lines", "parquet"):
        return kind if any(kind_of_name(pattern) == kind for pattern in matching) else None
    return "text" if matching else None


def _is_counted(name: str, patterns: Sequence[str]) -> bool:
    """Return True if a folder's unmatched file is a readable data file that was not excluded on purpose."""
    asked = tuple(patterns) == SOURCE_PATTERNS or any(_matches(name, pattern) for pattern in patterns)
    return asked and kind_of_name(name) is not None


def _matches(name: str, pattern: str) -> bool:
    """Match a relative path against a pattern; `**/` matches any number of folders, including none."""
    target = name if "/" in pattern else name.rpartition("/")[2]
    return any(fnmatch.fnmatchcase(target, form) for form in (pattern, pattern.replace("**/", "")))


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
        records: which records are read, and what of them.
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
    records: RecordOptions = TEXTS
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
        how = [self.strict, self.allow_truncated, self.template, fragments]
        deciding = [*self.records.deciding.values(), *how]
        return hashlib.sha256(json.dumps(deciding).encode()).hexdigest()[:16]

    def files(self, report: ReadReport | None = None) -> list[CorpusFile]:
        """Return its files in the order of `find_files`, those of a log from oldest to newest; there may be none."""
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
    siblings = path.parent.iterdir() if path.parent.is_dir() else iter(())
    rotated = [(int(found[1]), other) for other in siblings if (found := name.fullmatch(other.name))]
    older = [other for _, other in sorted(rotated, key=lambda item: (-item[0], item[1].name))]
    return [*older, *([path] if path.exists() else [])]
