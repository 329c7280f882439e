"""Building a REST store from text: tokenize, lay out segments, sort each, publish; resumable at every step.

Work goes on in `.NAME.partial` beside the output, under a lock:

    build.json           what is being built; another corpus, tokenizer or option starts clean
    tokens/              token shards (draftstore.tokens)
    layout.json          marker: tokens.bin and segments.bin are complete
    sorted-00000         marker: this segment's suffix array and tables are in place
    store/               the store, published by one rename

A killed build leaves no store that opens; the same command again goes on after the last marker. The arrays are the
same bytes for the same input, whatever the number of processes and interruptions.
"""

import dataclasses
import datetime
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftstore.corpus import SOURCE_PATTERNS, ReadReport, corpus_fingerprint, read_corpus
from draftstore.errors import BuildError, StoreError
from draftstore.files import fsync_path, locked_directory, publish_directory, write_atomic
from draftstore.manifest import FileEntry, Manifest, load_manifest, save_manifest
from draftstore.rest import KIND, TOKENIZER_FOLDER
from draftstore.suffix import (
    KEY_STRIDE,
    MAX_SEGMENT_TOKENS,
    first_row_table,
    key_layout,
    key_table,
    read_only,
    suffix_array,
)
from draftstore.tokenizer import TextTokenizer
from draftstore.tokens import TokenShards, sentinel, token_dtype, tokenize_corpus

SEGMENT_TOKENS = 1 << 28
"""Tokens of a segment by default: sorting one takes nine bytes of memory a token, so 2.4 GB."""


@dataclasses.dataclass
class Progress:
    """Where a build reports to; each is called many times with totals so far.

    Attributes:
        tokenized: documents, tokens, characters.
        sorted: tokens sorted, tokens in all.
        hashed: bytes hashed, bytes in all.
    """

    tokenized: Callable[[int, int, int], None] = lambda _documents, _tokens, _characters: None
    sorted: Callable[[int, int], None] = lambda _tokens, _all: None
    hashed: Callable[[int, int], None] = lambda _bytes, _all: None


@dataclasses.dataclass(frozen=True)
class RestOptions:
    """What is built, and from what.

    Attributes:
        corpus: files and folders.
        name: name of the store, for people.
        column: key or column of the text in records.
        glob: which files of a folder are read.
        strict: end at the first bad record.
        segment_tokens: most tokens of a segment.
    """

    corpus: tuple[Path, ...]
    name: str
    column: str = "text"
    glob: tuple[str, ...] = SOURCE_PATTERNS
    strict: bool = False
    segment_tokens: int = SEGMENT_TOKENS

    def inputs(self) -> str:
        """Identity of the corpus files and of how they are read."""
        return corpus_fingerprint(self.corpus, glob=self.glob, column=self.column, strict=self.strict)


@dataclasses.dataclass(frozen=True)
class BuildResult:
    """A finished store, and what was met on the way; `resumed` if nothing had to be built."""

    path: Path
    manifest: Manifest
    report: ReadReport
    reused: bool


def build_rest(
    options: RestOptions,
    tokenizer: TextTokenizer,
    out: Path,
    *,
    overwrite: bool = False,
    workers: int | None = None,
    progress: Progress | None = None,
) -> BuildResult:
    """Build a REST store, or go on with an interrupted build of the same.

    Args:
        options: what to build.
        tokenizer: makes the token ids; a copy goes into the store.
        out: directory of the store; its parent is made if absent.
        overwrite: replace a store that is there.
        workers: processes that sort segments; all cores by default.
        progress: told how far the build is.

    Raises:
        BuildError: `out` holds something else, another build is at work there, no space, a worker died.
        CorpusError: the corpus cannot be read, or holds no text.
    """
    if not 2 <= options.segment_tokens <= MAX_SEGMENT_TOKENS:
        raise BuildError(f"segments of {options.segment_tokens:,} tokens: expected 2 to {MAX_SEGMENT_TOKENS:,}")
    out = Path(os.path.abspath(out))  # noqa: PTH100 (resolve() would follow a link that should be replaced)
    progress = progress or Progress()
    plan = _plan(options, tokenizer)
    report = ReadReport()
    finished = _finished(out, plan)
    if finished and not overwrite:
        return BuildResult(out, finished, report, reused=True)
    if out.exists() and not overwrite:
        raise BuildError(f"{out} exists and is not this build: choose another --out, or pass --overwrite")
    partial = out.with_name(f".{out.name}.partial")
    with locked_directory(partial):
        _start(partial, plan)
        documents = read_corpus(
            options.corpus,
            render=lambda messages: tokenizer.render_chat(messages, add_generation_prompt=False),
            report=report,
            column=options.column,
            glob=options.glob,
            strict=options.strict,
        )
        shards = tokenize_corpus(
            documents,
            tokenizer,
            partial / "tokens",
            corpus_fingerprint=f"{plan['inputs']} {plan['template']}",
            source=", ".join(map(str, options.corpus)),
            on_progress=progress.tokenized,
        )
        store = partial / "store"
        _lay_out(shards, store, partial / "layout.json", options.segment_tokens)
        _sort_segments(store, partial, shards.vocab_size, workers or os.cpu_count() or 1, progress)
        (store / TOKENIZER_FOLDER).mkdir(exist_ok=True)
        tokenizer.save(store / TOKENIZER_FOLDER)
        manifest = _describe(options, tokenizer, shards, store, plan, progress)
        save_manifest(store, manifest)
        publish_directory(store, out)
        shutil.rmtree(partial)
    return BuildResult(out, manifest, report, reused=False)


def _plan(options: RestOptions, tokenizer: TextTokenizer) -> dict[str, Any]:
    """Return what decides the bytes of the store, as JSON values."""
    return {
        "kind": KIND,
        "inputs": options.inputs(),
        "tokenizer": tokenizer.fingerprint,
        "template": tokenizer.template_fingerprint,
        "segment_tokens": options.segment_tokens,
    }


def _finished(out: Path, plan: dict[str, Any]) -> Manifest | None:
    """Return the manifest of a store at `out` that this very build made, if one opens."""
    try:
        manifest = load_manifest(out, KIND)
    except StoreError:
        return None
    return manifest if manifest.parameters.get("plan") == plan else None


def _start(partial: Path, plan: dict[str, Any]) -> None:
    """Empty the working directory unless it is of this build."""
    marker = partial / "build.json"
    text = json.dumps(plan, indent=2, sort_keys=True)
    if marker.exists() and marker.read_text(encoding="utf-8") == text:
        return
    for path in partial.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    write_atomic(marker, text.encode())


def _lay_out(shards: TokenShards, store: Path, marker: Path, segment_tokens: int) -> None:
    """Write tokens.bin and segments.bin, and make room for the other arrays.

    Raises:
        BuildError: not enough space on the disk.
    """
    if marker.exists():
        return
    shutil.rmtree(store, ignore_errors=True)
    store.mkdir()
    width = shards.dtype.itemsize
    needed = (shards.token_count + shards.document_count) * (width + 4 + 8 // KEY_STRIDE + 1)
    free = shutil.disk_usage(store).free
    if free < needed:
        raise BuildError(f"{store} needs about {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free: make room")
    lengths = []
    with (store / "tokens.bin").open("wb") as file:
        for segment in _segments(shards, segment_tokens):
            length = 0
            for piece in segment:
                piece.tofile(file)
                length += len(piece)
            lengths.append(length)
    starts = np.cumsum([0, *lengths])
    key_counts = [-(-length // KEY_STRIDE) for length in lengths]
    key_starts = np.cumsum([0, *key_counts])
    segments = np.stack([starts[:-1], lengths, key_starts[:-1]], axis=1).astype("<i8")
    segments.tofile(store / "segments.bin")
    sizes = {
        "suffixes.bin": 4 * int(starts[-1]),
        "keys.bin": 8 * int(key_starts[-1]),
        "first_rows.bin": 4 * len(lengths) * (shards.vocab_size + 1),
    }
    for name, size in sizes.items():
        with (store / name).open("wb") as file:
            file.truncate(size)
    for path in store.iterdir():
        fsync_path(path)
    write_atomic(marker, json.dumps({"segments": len(lengths)}).encode())


def _segments(shards: TokenShards, segment_tokens: int) -> Iterator[Iterator[NDArray[Any]]]:
    """Yield the segments, each as pieces of closed documents; a document longer than a segment is cut.

    A new segment starts where the next document does not fit, so the cuts depend on the documents alone.
    """
    pieces = _closed_documents(shards, segment_tokens)
    piece = next(pieces, None)

    def fill() -> Iterator[NDArray[Any]]:
        nonlocal piece
        room = segment_tokens
        while piece is not None:
            array, ends = piece
            whole = int(np.searchsorted(ends, room, side="right"))
            if whole == 0:
                return
            size = int(ends[whole - 1])
            yield array[:size]
            room -= size
            piece = (array[size:], ends[whole:] - size) if whole < len(ends) else next(pieces, None)

    while piece is not None:
        yield fill()


def _closed_documents(
    shards: TokenShards, segment_tokens: int
) -> Iterator[tuple[NDArray[Any], NDArray[np.int64]]]:
    """Yield each shard's tokens with a sentinel after every document, and where the documents end in them.

    A sentinel is also put where a document would be longer than a segment.
    """
    for tokens, offsets in shards.arrays():
        if len(tokens) == 0:
            continue
        cuts = [
            np.append(np.arange(start + segment_tokens - 1, end, segment_tokens - 1), end)
            for start, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)
            if end - start >= segment_tokens
        ]
        ends = np.unique(np.concatenate([offsets[1:], *cuts]))
        ends = ends[ends > 0]
        yield np.insert(tokens, ends, sentinel(tokens.dtype)), ends + np.arange(1, len(ends) + 1)


def _sort_segments(store: Path, partial: Path, vocab_size: int, workers: int, progress: Progress) -> None:
    """Sort the segments that no marker stands for, each in a process of its own if there are several.

    Raises:
        BuildError: a process died.
    """
    segments = np.fromfile(store / "segments.bin", "<i8").reshape(-1, 3)
    markers = [partial / f"sorted-{i:05d}" for i in range(len(segments))]
    open_segments = [i for i, marker in enumerate(markers) if not marker.exists()]
    total = int(segments[:, 1].sum())
    done = total - int(segments[open_segments, 1].sum())
    progress.sorted(done, total)

    def finish(segment: int) -> None:
        nonlocal done
        write_atomic(markers[segment], b"")
        done += int(segments[segment, 1])
        progress.sorted(done, total)

    workers = min(workers, len(open_segments))
    if workers <= 1:
        for i in open_segments:
            sort_segment(store, i, vocab_size)
            finish(i)
        return
    # A fresh process for each worker: forking a process with threads (tokenizers, numba) may deadlock.
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        futures: dict[Future[None], int] = {pool.submit(sort_segment, store, i, vocab_size): i for i in open_segments}
        try:
            for future in as_completed(futures):
                future.result()
                finish(futures[future])
        except BrokenProcessPool:
            raise BuildError(
                "a sorting process was killed, perhaps for want of memory: run the command again with fewer "
                "--workers or smaller --segment-tokens; it goes on where it stopped"
            ) from None
        finally:
            for future in futures:
                future.cancel()


def sort_segment(store: Path, segment: int, vocab_size: int) -> None:
    """Sort one segment of tokens.bin and write its part of the other arrays."""
    segments = np.fromfile(store / "segments.bin", "<i8").reshape(-1, 3)
    start, length, first_key = segments[segment].tolist()
    dtype = token_dtype(vocab_size)
    tokens = read_only(np.memmap(store / "tokens.bin", dtype, "r", start * dtype.itemsize, (length,)))
    suffixes = suffix_array(tokens, vocab_size)
    keys = key_table(tokens, read_only(suffixes), vocab_size, *key_layout(vocab_size))
    first_rows = first_row_table(tokens, vocab_size)
    _write_at(store / "suffixes.bin", suffixes, start)
    _write_at(store / "keys.bin", keys, first_key)
    _write_at(store / "first_rows.bin", first_rows, segment * (vocab_size + 1))


def _write_at(path: Path, array: NDArray[Any], item: int) -> None:
    """Write an array into a file from an item on, and flush it to disk."""
    with path.open("r+b") as file:
        file.seek(item * array.itemsize)
        array.tofile(file)
        file.flush()
        os.fsync(file.fileno())


def _describe(
    options: RestOptions,
    tokenizer: TextTokenizer,
    shards: TokenShards,
    store: Path,
    plan: dict[str, Any],
    progress: Progress,
) -> Manifest:
    """Hash the files of a finished store and return its manifest."""
    paths = sorted(path for path in store.rglob("*") if path.is_file())
    sizes = [path.stat().st_size for path in paths]
    files, done = {}, 0
    for path, size in zip(paths, sizes, strict=True):
        files[path.relative_to(store).as_posix()] = FileEntry.of(path)
        done += size
        progress.hashed(done, sum(sizes))
    segments = np.fromfile(store / "segments.bin", "<i8").reshape(-1, 3)
    content = [entry.sha256 for shard in shards.shards for _, entry in sorted(shard.files.items())]
    return Manifest(
        kind=KIND,
        name=options.name,
        created=_now(),
        vocab_size=shards.vocab_size,
        token_dtype=shards.dtype.name,
        tokenizer=tokenizer.identity,
        parameters={"plan": plan, "segment_tokens": options.segment_tokens},
        corpus={
            "fingerprint": hashlib.sha256("".join(content).encode()).hexdigest(),
            "sources": [str(path) for path in options.corpus],
            "characters": shards.character_count,
        },
        counts={
            "documents": shards.document_count,
            "tokens": shards.token_count,
            "entries": int(segments[:, 1].sum()),
            "segments": len(segments),
        },
        files=files,
    )


def _now() -> str:
    """Return the time of the build; SOURCE_DATE_EPOCH, if set, makes even manifests reproducible."""
    epoch = os.environ.get("SOURCE_DATE_EPOCH")
    now = datetime.datetime.fromtimestamp(int(epoch), datetime.UTC) if epoch else datetime.datetime.now(datetime.UTC)
    return now.isoformat(timespec="seconds")
