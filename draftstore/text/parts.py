"""A corpus tokenized in parts, on several processes or machines, then cut into the same shards as by one process.

    parts/FINGERPRINT/00000/   the documents of one part as one token shard; complete once it has this name
        documents.json         their ids and characters, and what was skipped
    parts/FINGERPRINT/.00000.* an attempt at a part: of a process that works, or that died

A part is some small files, or a stretch of a large one. Which process tokenizes it, and how often, leaves no trace.
"""

import dataclasses
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from draftstore.errors import NoTextError, TokenizerError, needs_extra
from draftstore.mapping import Pool, attempt
from draftstore.storage.files import write_json
from draftstore.storage.report import ReadReport
from draftstore.storage.streams import COMPRESSION_SUFFIXES, STREAM_ERRORS, read_lines
from draftstore.text.corpus import read_files
from draftstore.text.encoding import Encoded, Progress, tokenize_corpus
from draftstore.text.records import CorpusFile, Document, Stretch, row_counts
from draftstore.text.tokenizer import TextTokenizer, load_tokenizer
from draftstore.text.tokens import open_shards

WANTED_PARTS = 256
"""How many parts a corpus becomes, about, if they are not too small or too large."""
PART_BYTES = (1 << 20, 1 << 26)
"""Least and most bytes of text in a part, about: 0.2 to 13 seconds of one core."""
PACKED = 4
"""How many bytes a byte of a packed file becomes, about."""
DOCUMENTS = "documents.json"
ONE_SHARD = 1 << 62


class Reading(NamedTuple):
    """How parts become token ids.

    Attributes:
        column: key or column of the text in records.
        strict: whether to stop at the first bad record.
        allow_truncated: whether to go on after a file that cannot be read to its end.
        tokenizer: folder of the tokenizer's files.
        name: its name.
        fingerprint: its fingerprint.
    """

    column: str
    strict: bool
    allow_truncated: bool
    tokenizer: Path
    name: str
    fingerprint: str


def tokenize_parts(
    pool: Pool,
    reading: Reading,
    files: Sequence[CorpusFile],
    folder: Path,
    report: ReadReport,
    on_progress: Progress = lambda _documents, _tokens, _characters: None,
) -> Iterator[Encoded]:
    """Tokenize files in parts on a pool; yield the documents in reading order, once all parts are done."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = plan_parts(files)
    targets = [folder / f"{number:05d}" for number in range(len(parts))]
    jobs = {
        number: (reading, part, target)
        for number, (part, target) in enumerate(zip(parts, targets, strict=True))
        if not target.is_dir()
    }
    sums = [0, 0, 0]
    on_progress(0, 0, 0)
    for _, sizes in pool.results(tokenize_part, jobs):
        sums = [sum(pair) for pair in zip(sums, sizes, strict=True)]
        on_progress(*sums)
    _add_reports(report, [ReadReport.of_notes(_read_notes(target)["report"]) for target in targets], parts)
    for target in targets:
        yield from _documents(target)


def plan_parts(files: Sequence[CorpusFile], size: int | None = None) -> list[tuple[CorpusFile, ...]]:
    """Return files, or stretches of large ones, in groups of about `size` bytes of text, in order."""
    lengths = [_text_bytes(file.path) for file in files]
    least, most = PART_BYTES
    size = size or min(max(sum(lengths) // WANTED_PARTS, least), most)
    parts: list[tuple[CorpusFile, ...]] = []
    small: list[CorpusFile] = []
    filled = 0
    for file, length in zip(files, lengths, strict=True):
        stretches = list(_stretches(file, size)) if length > size else [file]
        if filled + length > size and small:
            parts.append(tuple(small))
            small, filled = [], 0
        if len(stretches) > 1:
            parts += [(stretch,) for stretch in stretches]
        else:
            small, filled = [*small, file], filled + length
    return [*parts, tuple(small)] if small else parts


def _text_bytes(path: Path) -> int:
    """Return the bytes of text in a file, about."""
    return path.stat().st_size * (PACKED if path.suffix.lower() in COMPRESSION_SUFFIXES else 1)


def _stretches(file: CorpusFile, size: int) -> Iterator[CorpusFile]:
    """Cut a file of records; the last stretch is open, so that whoever reads it meets what the file ends with."""
    cuts = {"lines": _line_cuts, "parquet": _row_cuts}.get(file.kind)
    found = list(cuts(file.path, size)) if cuts else [(0, 0)]
    for (before, offset), (stop, _) in pairwise(found):
        yield dataclasses.replace(file, stretch=Stretch(before, stop - before, offset))
    yield dataclasses.replace(file, stretch=Stretch(found[-1][0], None, found[-1][1]))


def _line_cuts(path: Path, size: int) -> Iterator[tuple[int, int]]:
    """Yield lines and bytes before every stretch of about `size` bytes."""
    yield 0, 0
    last = place = 0
    with suppress(*STREAM_ERRORS):
        for number, line in enumerate(read_lines(path), start=1):
            if line is None:  # too long to be kept: nobody knows where the next one starts
                return
            place += len(line)
            if place - last >= size:
                last = place
                yield number, place


def _row_cuts(path: Path, size: int) -> Iterator[tuple[int, int]]:
    """Yield the rows before every stretch of row groups of about `size` bytes, and 0."""
    yield 0, 0
    with needs_extra("pyarrow"):
        import pyarrow as pa
        from pyarrow import parquet
    try:
        metadata = parquet.read_metadata(path)
    except (pa.ArrowException, OSError):
        return
    rows = filled = 0
    for group, count in enumerate(row_counts(metadata)):
        rows += count
        filled += metadata.row_group(group).total_byte_size
        if filled >= size:
            filled = 0
            yield rows, 0


def tokenize_part(reading: Reading, files: Sequence[CorpusFile], target: Path) -> tuple[int, int, int]:
    """Tokenize one part into a folder; return its documents, tokens and characters."""
    # Parts are tokenized side by side, one in each process.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    tokenizer = _tokenizer(reading.tokenizer, reading.name, reading.fingerprint)
    report = ReadReport()
    documents = read_files(
        files,
        render=lambda messages: tokenizer.render_chat(messages, add_generation_prompt=False),
        report=report,
        column=reading.column,
        strict=reading.strict,
        allow_truncated=reading.allow_truncated,
    )
    notes: list[tuple[str, int]] = []
    with attempt(target) as folder:
        with suppress(NoTextError):
            tokenize_corpus(
                _noted(documents, notes), tokenizer, folder, corpus_fingerprint="", shard_tokens=ONE_SHARD
            )
        write_json(folder / DOCUMENTS, {"documents": notes, "report": dataclasses.asdict(report)})
    tokens = open_shards(target).token_count if notes else 0
    return len(notes), tokens, sum(characters for _, characters in notes)


@lru_cache(maxsize=1)
def _tokenizer(folder: Path, name: str, fingerprint: str) -> TextTokenizer:
    """Load the tokenizer of a build, once in a process."""
    tokenizer = load_tokenizer(folder, name)
    if tokenizer.fingerprint != fingerprint:
        raise TokenizerError(
            f"the tokenizer in {folder} is another one in this process: all machines of a cluster need the same "
            "version of the package `tokenizers`"
        )
    return tokenizer


def _noted(documents: Iterator[Document], notes: list[tuple[str, int]]) -> Iterator[Document]:
    """Pass documents on, and note id and characters of each."""
    for document in documents:
        notes.append((document.id, len(document.text)))
        yield document


def _read_notes(target: Path) -> Mapping[str, Any]:
    notes: dict[str, Any] = json.loads((target / DOCUMENTS).read_text(encoding="utf-8"))
    return notes


def _documents(target: Path) -> Iterator[Encoded]:
    """Yield the documents of a part."""
    notes = _read_notes(target)["documents"]
    if notes:
        shards = open_shards(target)
        digests = chain.from_iterable(shards.digests())
        for (name, characters), ids, digest in zip(notes, shards.documents(), digests, strict=True):
            yield Encoded(name, characters, ids, digest.tobytes())


def _add_reports(
    report: ReadReport, found: Sequence[ReadReport], parts: Sequence[Sequence[CorpusFile]]
) -> None:
    """Complete a report by those of all parts, in order: a file is unread if all its stretches are."""
    for one in found:
        report.add(one)
    unread = Counter(path for one in found for path in one.unread)
    stretches = Counter(str(file.path) for part in parts for file in part)
    report.unread += [path for path in stretches if unread[path] == stretches[path]]
