"""Tokenizing: documents become token shards, on this machine or on the nodes of a cluster.

A shard ends with the document that fills it, and with the last one of a group of files, so shards depend on the
documents and files alone. On a cluster, each group becomes a part with shards of its own, in a folder beside them:

    parts-0123456789abcdef/    named after the identity of the corpus
        tokenizer/             the tokenizer, for the nodes
        00000/                 a finished part: its token shards, and report.json
        report.json            the sum of their reports

This process links the shards of all parts to one directory, the same as if it had made them.
"""

import dataclasses
import hashlib
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache, partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeAlias

from draftstore.cluster import Cluster
from draftstore.errors import CorpusError, NoTextError
from draftstore.storage.files import load_json, remove, write_json
from draftstore.storage.manifest import TOKENIZER_FOLDER
from draftstore.storage.report import REPORTS, OnProgress, ReadReport, ignore
from draftstore.text.records import Document
from draftstore.text.tokenizer import TextTokenizer, load_tokenizer
from draftstore.text.tokens import (
    Filling,
    Shard,
    State,
    TokenShards,
    finish_shards,
    join_shards,
    open_shards,
    resume_shards,
)

SHARD_TOKENS = 4_000_000
BATCH_CHARACTERS = 1_000_000
PIECE_CHARACTERS = 1 << 17
"""Maximum characters of a piece: BPE without a pre-tokenizer slows down with length, and pieces run in parallel."""
REPORT, PARTS = "report.json", "parts"
CHECKED = 1 << 12
"""About the maximum number of files that nodes look for before the work."""

Group: TypeAlias = Callable[..., Iterator[Document]]
"""Reads the documents of some files: called with `render`, which turns conversations into text, and `report`."""
TextPiece: TypeAlias = tuple[str, str, bytes | None]
"""The id of a document, a piece of its text, and the digest; None: more pieces follow."""


def tokenize_groups(
    groups: Sequence[Group],
    tokenizer: TextTokenizer,
    directory: Path,
    *,
    report: ReadReport,
    cluster: str | None,
    files: Callable[[], Sequence[Path]],
    corpus_fingerprint: str,
    source: str = "the corpus",
    on_progress: OnProgress = ignore,
) -> TokenShards:
    """Write groups of files as token shards, here or on a cluster, whose nodes must see the `files`.

    The report gets what was read and skipped. Other arguments and errors are those of `tokenize_corpus`.
    """
    options: dict[str, Any] = {
        "corpus_fingerprint": corpus_fingerprint,
        "source": source,
        "on_progress": on_progress,
    }
    if cluster and len(groups) > 1:
        return _tokenize_apart(cluster, groups, tokenizer, directory, report, files, **options)
    _remove_parts(directory)
    documents = (group(render=tokenizer.render_document, report=report) for group in groups)
    return tokenize_corpus(documents, tokenizer, directory, **options)


def tokenize_corpus(
    groups: Iterable[Iterator[Document]],
    tokenizer: TextTokenizer,
    directory: Path,
    *,
    corpus_fingerprint: str,
    source: str = "the corpus",
    shard_tokens: int = SHARD_TOKENS,
    batch_chars: int = BATCH_CHARACTERS,
    on_progress: OnProgress = ignore,
) -> TokenShards:
    """Write a corpus as token shards, or resume an interrupted call.

    Ids exclude BOS and EOS. A document above `PIECE_CHARACTERS` is encoded in pieces, split at a line break or space if
    possible: one or two ids at each split can differ from those of the whole text. Memory holds two batches, a shard
    and a document's text. Reading runs one batch ahead, in a thread.

    Args:
        groups: documents by group, always the same for a given `corpus_fingerprint`; those of finished shards are
            skipped.
        directory: used by one process at a time; shards of another tokenizer, corpus or shard size are removed.
        source: name of the corpus in errors.

    Raises:
        NoTextError: the corpus has no tokens; the shards are still written and can be opened.
        CorpusError: the documents differ from those of an interrupted call.
        TokenRangeError: the tokenizer returned an id outside its vocabulary.
    """
    state = State(tokenizer.vocab_size, tokenizer.identity, corpus_fingerprint, shard_tokens)
    directory.mkdir(parents=True, exist_ok=True)
    finished, shards = resume_shards(directory, state)
    if not finished:
        found, shards = deque(shards), []
        for documents in groups:
            others = _skip(documents, found, shards, source)
            filling = Filling(state.vocab_size)
            filling.report(shards, on_progress)
            for batch in _read_ahead(_batches(others, batch_chars)):
                encoded = tokenizer.encode_documents([text for _, text, _ in batch])
                for (name, text, digest), ids in zip(batch, encoded, strict=True):
                    filling.add(name, text, ids, digest)
                    if digest is not None and filling.tokens >= shard_tokens:
                        shards.append(filling.write(directory, len(shards)))
                        filling = Filling(state.vocab_size)
                filling.report(shards, on_progress)
            if filling.digests:
                shards.append(filling.write(directory, len(shards)))
        if found:
            raise _moved(found[0], source)
        finish_shards(directory, state, shards)
    return _with_text(open_shards(directory), source)


def _with_text(shards: TokenShards, source: str) -> TokenShards:
    if shards.token_count == 0:
        raise NoTextError(f"no text found in {source}")
    return shards


def _read_ahead(batches: Iterator[list[Any]]) -> Iterator[list[Any]]:
    """Yield the batches, reading the next one in a thread while the current one is processed."""
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="corpus") as pool:
        future = pool.submit(next, batches, None)
        while (batch := future.result()) is not None:
            future = pool.submit(next, batches, None)
            yield batch


def _batches(documents: Iterator[Document], batch_chars: int) -> Iterator[list[TextPiece]]:
    """Group documents, long ones in pieces, into lists of about `batch_chars` characters."""
    batch: list[TextPiece] = []
    size = 0
    for document in documents:
        for text, last in split_text(document.text, PIECE_CHARACTERS):
            batch.append((document.id, text, document.identity.document if last else None))
            size += len(text)
            if size >= batch_chars:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def split_text(text: str, limit: int) -> Iterator[tuple[str, bool]]:
    """Yield `(piece, is_last)`: consecutive pieces of the text of at most `limit` characters.

    A piece ends after the last line break in its second half, else before the last space there, else at the limit.
    """
    start = 0
    while len(text) - start > limit:
        middle, end = start + max(limit // 2, 1), start + limit
        cut = text.rfind("\n", middle, end) + 1 or max(text.rfind(" ", middle, end), 0) or end
        yield text[start:cut], False
        start = cut
    yield text[start:], True


def _skip(
    documents: Iterator[Document], found: deque[Shard], shards: list[Shard], source: str
) -> Iterator[Document]:
    """Move the finished shards of a group to `shards`, and return its other documents; CorpusError if they moved."""
    for first in documents:
        if not found:
            return chain([first], documents)
        shard = found.popleft()
        ids = [first.id, *(document.id for document in islice(documents, shard.documents - 1))]
        if len(ids) != shard.documents or (ids[0], ids[-1]) != (shard.first_id, shard.last_id):
            raise _moved(shard, source)
        shards.append(shard)
    return iter(())


def _moved(shard: Shard, source: str) -> CorpusError:
    return CorpusError(
        f"{source} changed since the build was interrupted (documents {shard.first_id!r} to {shard.last_id!r} have "
        "moved): remove the unfinished shards and start again"
    )


def _tokenize_apart(
    cluster: str,
    groups: Sequence[Group],
    tokenizer: TextTokenizer,
    directory: Path,
    report: ReadReport,
    files: Callable[[], Sequence[Path]],
    *,
    corpus_fingerprint: str,
    source: str,
    on_progress: OnProgress,
) -> TokenShards:
    state = State(tokenizer.vocab_size, tokenizer.identity, corpus_fingerprint, SHARD_TOKENS)
    digest = hashlib.sha256(corpus_fingerprint.encode()).hexdigest()[:16]
    folder = directory / f"{PARTS}-{digest}"
    directory.mkdir(parents=True, exist_ok=True)
    finished, _ = resume_shards(directory, state)
    if not finished:
        (folder / TOKENIZER_FOLDER).mkdir(parents=True, exist_ok=True)
        tokenizer.save(folder / TOKENIZER_FOLDER)
        parts, tokens = [folder / f"{number:05d}" for number in range(len(groups))], 0
        with Cluster(cluster, folder) as nodes:
            nodes.check(_other_tokenizer, folder, tokenizer.name, tokenizer.fingerprint)
            paths = files()
            some = [(path, path.stat().st_size) for path in paths[:: 1 + len(paths) // CHECKED]]
            nodes.check(_other_files, some)
            make = partial(tokenize_part, folder, tokenizer.name, corpus_fingerprint, source)
            for number in nodes.map(make, [*enumerate(groups)]):
                tokens += open_shards(parts[number]).token_count
                on_progress(tokens, None)
        whole = ReadReport()
        for part in parts:
            whole.add(_read_report(part))
        write_json(folder / REPORT, dataclasses.asdict(whole))
        join_shards(directory, state, map(open_shards, parts))
    if (folder / REPORT).exists():
        report.add(_read_report(folder))
    _remove_parts(directory)
    return _with_text(open_shards(directory), source)


def _remove_parts(directory: Path) -> None:
    """Remove what a cluster has left, the report of all parts last."""
    for folder in directory.glob(f"{PARTS}-*"):
        for part in folder.iterdir():
            if part.name != REPORT:
                remove(part)
        remove(folder)


def _read_report(folder: Path) -> ReadReport:
    return load_json((folder / REPORT).read_bytes(), REPORTS)


def tokenize_part(
    folder: Path, name: str, corpus_fingerprint: str, source: str, numbered: tuple[int, Group]
) -> int:
    """Tokenize a group of files into a part, unless it exists; return its number.

    Several processes may do so at the same time.
    """
    number, group = numbered
    part = folder / f"{number:05d}"
    if part.exists():
        return number
    tokenizer, report = _tokenizer_in(folder, name), ReadReport()
    unfinished = folder / f".{part.name}-{secrets.token_hex(8)}"
    try:
        documents = group(render=tokenizer.render_document, report=report)
        with suppress(NoTextError):
            tokenize_corpus(
                [documents], tokenizer, unfinished, corpus_fingerprint=corpus_fingerprint, source=source
            )
        write_json(unfinished / REPORT, dataclasses.asdict(report))
        unfinished.rename(part)
    except OSError:
        if not part.exists():  # another process was faster
            raise
    finally:
        remove(unfinished)
    return number


@cache
def _tokenizer_in(folder: Path, name: str) -> TextTokenizer:
    return load_tokenizer(folder / TOKENIZER_FOLDER, name)


def _other_files(files: Sequence[tuple[Path, int]]) -> str:
    """Return why a node cannot read the corpus; empty if it sees these files, of these sizes."""
    for path, size in files:
        if not path.is_file() or path.stat().st_size != size:
            return f"it sees no {path}, or another one: choose a folder that all nodes share"
    return ""


def _other_tokenizer(folder: Path, name: str, fingerprint: str) -> str:
    """Return why a node cannot tokenize; empty if it can."""
    own = _tokenizer_in(folder, name).fingerprint
    return "" if own == fingerprint else "it reads the tokenizer as another one: install the same packages"
