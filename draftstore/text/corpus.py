"""Corpora: files and folders as one stream of documents with stable ids, always in the same order.

A bad record is counted and reported with its position; it stops the reading only with `strict`. A missing path or an
unknown kind of file always does, and a file that cannot be read to its end unless that is allowed: nobody sees what is
missing from a store.
"""

import fnmatch
import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

from draftstore.errors import CorpusError, TruncatedCorpusError
from draftstore.storage.report import ReadReport, RecordProblem, passed_over_text
from draftstore.text.identity import file_identity
from draftstore.text.records import (
    ACCEPTED,
    TEXT_SUFFIXES,
    CorpusFile,
    Document,
    Render,
    ending_of_name,
    kind_of_file,
    kind_of_name,
    read_documents,
)

SOURCE_PATTERNS = tuple(f"*{suffix}" for suffix in TEXT_SUFFIXES)
SKIPPED_FOLDERS = frozenset({"node_modules", "__pycache__"})


def read_corpus(
    paths: Sequence[Path],
    *,
    render: Render,
    report: ReadReport,
    column: str = "text",
    glob: str | Sequence[str] = SOURCE_PATTERNS,
    strict: bool = False,
    allow_truncated: bool = False,
) -> Iterator[Document]:
    """Stream the documents of files and folders, always in the same order.

    A record of JSON Lines or Parquet holds its text under `column`, or a conversation under `messages` (or
    under `column`): a list of objects with `role` and `content`.
    """
    return read_files(
        find_files(paths, glob, report),
        render=render,
        report=report,
        column=column,
        strict=strict,
        allow_truncated=allow_truncated,
    )


def find_files(paths: Sequence[Path], glob: str | Sequence[str], report: ReadReport) -> list[CorpusFile]:
    """Return the files that `read_corpus` reads, and put those that it does not into the report."""
    files, passed_over = _find_files(paths, glob)
    report.passed_over = dict(Counter(ending_of_name(path.name) for path in passed_over))
    return files


def read_files(
    files: Iterable[CorpusFile],
    *,
    render: Render,
    report: ReadReport,
    column: str = "text",
    strict: bool = False,
    allow_truncated: bool = False,
) -> Iterator[Document]:
    """Stream the documents of files that `list_files` found, or of stretches of them; otherwise as `read_corpus`."""
    documents = partial(read_documents, column=column, render=render)
    return _read_files(files, documents, report, partial(_refuse, strict, allow_truncated))


def corpus_fingerprint(
    paths: Sequence[Path],
    *,
    glob: str | Sequence[str] = SOURCE_PATTERNS,
    rehash: bool = False,
    **options: str | int | bool,
) -> str:
    """Return the identity of a corpus: SHA-256 over its files' paths and contents, and `options`.

    It tells whether a build can resume, or is done. Large files are read once, see `draftstore.text.identity`.

    Args:
        paths: files and folders.
        glob: which files of a folder are read.
        rehash: whether to read large files again.
        options: how the corpus is read.

    Raises:
        CorpusError: see `read_corpus`.
    """
    files = [
        (str(file.path.resolve()), file.name, file_identity(file.path, rehash=rehash))
        for file in list_files(paths, glob)
    ]
    return hashlib.sha256(json.dumps([files, options], sort_keys=True).encode()).hexdigest()


def list_files(paths: Sequence[Path], glob: str | Sequence[str] = SOURCE_PATTERNS) -> list[CorpusFile]:
    """Return the files that `read_corpus` reads, in its order: paths as given, folders sorted by name."""
    return _find_files(paths, glob)[0]


def _find_files(paths: Sequence[Path], glob: str | Sequence[str]) -> tuple[list[CorpusFile], list[Path]]:
    """Return the files to read, and the skipped data files in folders."""
    if not paths:
        raise CorpusError(f"no corpus is given: name {ACCEPTED}")
    patterns = (glob,) if isinstance(glob, str) else tuple(glob)
    absolute = [Path(os.path.abspath(path)) for path in paths]  # noqa: PTH100 (resolve() would follow links)
    root = Path(os.path.commonpath([path if path.is_dir() else path.parent for path in absolute]))
    files: dict[Path, CorpusFile] = {}
    passed_over: dict[Path, None] = {}
    for path in absolute:
        for found, kind in _folder_files(path, patterns) if path.is_dir() else [(path, kind_of_file(path))]:
            if kind is None:
                passed_over[found] = None
            else:
                files.setdefault(found, CorpusFile(found, found.relative_to(root).as_posix(), kind))
    return list(files.values()), [path for path in passed_over if path not in files]


def _folder_files(folder: Path, patterns: Sequence[str]) -> list[tuple[Path, str | None]]:
    """Return path and kind (None: skipped) of a folder's matching files, sorted by relative path."""
    found: list[tuple[Path, str | None]] = []
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in SKIPPED_FOLDERS]
        for name in names:
            path = Path(place, name)
            relative = path.relative_to(folder).as_posix()
            kind = _matched_kind(relative, patterns)
            if (kind is not None or _is_passed_over(relative, patterns)) and path.is_file():
                found.append((path, kind))
    if all(kind is None for _, kind in found):
        shown = ", ".join(patterns[:6]) + (", ..." if len(patterns) > 6 else "")
        endings = Counter(ending_of_name(path.name) for path, _ in found)
        advice = passed_over_text(endings) if found else "name others by a pattern, such as '*.jsonl.zst'"
        raise CorpusError(f"{folder} holds no file that matches {shown}: {advice}")
    return sorted(found, key=lambda item: item[0].relative_to(folder).as_posix())


def _matched_kind(name: str, patterns: Sequence[str]) -> str | None:
    """Return the kind of a folder's file under these patterns, or None if it does not match."""
    matching = [pattern for pattern in patterns if _matches(name, pattern)]
    kind = kind_of_name(name)
    if kind in ("lines", "parquet"):
        return kind if any(kind_of_name(pattern) == kind for pattern in matching) else None
    return "text" if matching else None


def _is_passed_over(name: str, patterns: Sequence[str]) -> bool:
    """Return True if a folder's unmatched file is a readable data file that was not excluded on purpose."""
    asked = tuple(patterns) == SOURCE_PATTERNS or any(_matches(name, pattern) for pattern in patterns)
    return asked and kind_of_name(name) is not None


def _matches(name: str, pattern: str) -> bool:
    """Match a relative path with a pattern; `**/` stands for any folders, or none."""
    target = name if "/" in pattern else name.rpartition("/")[2]
    return any(fnmatch.fnmatchcase(target, form) for form in (pattern, pattern.replace("**/", "")))


def _refuse(strict: bool, allow_truncated: bool, problem: RecordProblem) -> None:
    """Stop the reading at a problem that is not to be counted."""
    if problem.truncated and not allow_truncated:
        raise TruncatedCorpusError(
            f"{problem.place}: {problem.reason}: get the whole file, or pass --allow-truncated to do without the rest"
        )
    if strict and not problem.truncated:
        raise CorpusError(f"{problem.place}: {problem.reason}")


def _read_files(
    files: Iterable[CorpusFile],
    documents: Callable[[CorpusFile], Iterator[Document | RecordProblem]],
    report: ReadReport,
    refuse: Callable[[RecordProblem], None],
) -> Iterator[Document]:
    """Yield the documents of files, and record files of records without any text."""
    for file in files:
        before = report.documents
        yield from _counted(documents(file), report, refuse)
        if report.documents == before and file.kind != "text":
            report.unread.append(str(file.path))


def _counted(
    items: Iterable[Document | RecordProblem],
    report: ReadReport,
    refuse: Callable[[RecordProblem], None],
) -> Iterator[Document]:
    """Yield the documents with text, and count everything."""
    for item in items:
        if isinstance(item, RecordProblem):
            refuse(item)
            report.add_problem(item)
        elif not item.text or item.text.isspace():
            report.empty_documents += 1
        else:
            report.documents += 1
            yield item
