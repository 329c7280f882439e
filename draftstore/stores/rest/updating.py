"""A REST store from its predecessor: new documents are sorted and merged in, the rest is copied.

    before    segment 0: A B C D         wanted: A B D E F
    after     segment 0: A B D E F       A, B and D copied, C dropped, E and F sorted and merged in

Documents are identified by their digests (`documents.bin`). Remaining ones stay in their segments; neighbouring
segments that fit together become one; new documents fill the last segment, then new segments. So a store has few
segments, whatever its history. Its drafts are those of a store built from the same documents in one go: the order and
age of a segment's documents make no difference. The cost is that of copying the old documents and sorting the new ones.
"""

import hashlib
import os
from collections.abc import Iterable, Iterator
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftstore.cluster import address_of
from draftstore.errors import BuildError, StoreError
from draftstore.search.merging import Rows, merge_segment
from draftstore.storage.files import write_at
from draftstore.storage.report import Progress, ReadReport, silent
from draftstore.storage.staging import STORE, BuildResult, build_store
from draftstore.stores.rest.build import SEGMENT_TOKENS
from draftstore.stores.rest.segments import Piece, cut_segments, lay_out, read_segments, sort_segments
from draftstore.stores.rest.store import DOCUMENTS_FILE, KIND, RestStore, read_digests
from draftstore.text.digests import digest_keys
from draftstore.text.tokenizer import TextTokenizer
from draftstore.text.tokenizing import made_with, seal_store
from draftstore.text.tokens import TokenShards, sentinel, token_dtype

MERGED_SHARE = 0.25
"""Share of new tokens in a segment up to which merging is cheaper than sorting the segment again."""


class Contents(NamedTuple):
    """What a store is to hold.

    Attributes:
        digests: uint8 [n, 16], its documents, each once, in any order.
        corpus: facts for the manifest, see `Manifest.corpus`; the fingerprint is added.
        sources: files that the documents come from: users who may not read them may not read the store.
    """

    name: str
    digests: NDArray[np.uint8]
    corpus: dict[str, Any]
    sources: tuple[Path, ...] = ()
    segment_tokens: int = SEGMENT_TOKENS

    @property
    def fingerprint(self) -> str:
        """Identity of the documents, regardless of their order."""
        return hashlib.sha256(np.sort(digest_keys(self.digests)).tobytes()).hexdigest()

    def plan(self, tokenizer: TextTokenizer) -> dict[str, Any]:
        """Return everything that determines the drafts of the store, as JSON values."""
        return {
            "kind": KIND,
            "documents": self.fingerprint,
            **made_with(tokenizer),
            "segment_tokens": self.segment_tokens,
        }


def update_rest(
    contents: Contents,
    tokenizer: TextTokenizer,
    out: Path,
    *,
    base: Path | None = None,
    added: TokenShards | None = None,
    workers: int | None = None,
    progress: Progress = silent,
) -> BuildResult:
    """Build a REST store from documents of an older one and new ones, or resume an interrupted call.

    Documents of `base` that are not in `contents` are dropped; `added` has the other documents, each once. All have
    this tokenizer. `workers` threads merge and processes sort, by default one per core;
    a cluster named by $DRAFTSTORE_CLUSTER sorts instead.

    Raises BuildError (see `build_store`) if a document is neither in `base` nor in `added`, StoreError if the base
    cannot be opened, or has other digests or ids for its documents, and TokenizerError if it has another tokenizer.
    """
    threads = workers or os.cpu_count() or 1
    segments = [] if base is None else _segments_of(_open_base(base, tokenizer), contents.digests)
    _require_all(contents, [old.digests for old in segments], added)
    plan = contents.plan(tokenizer)

    def fill(partial: Path) -> ReadReport:
        store, vocab_size = partial / STORE, tokenizer.vocab_size
        groups = _neighbours(segments, contents.segment_tokens)
        size = sum(old.size for old in segments)
        if size == 0 and (added is None or added.token_count == 0):
            raise BuildError("no wanted document has any tokens: nothing to build from")
        size += added.token_count + added.document_count if added else 0
        lay_out(store, _contents_of(groups, added, contents.segment_tokens), vocab_size, size)
        pending = _merge_segments(groups, store, vocab_size, threads)
        sort_segments(store, pending, vocab_size, threads, progress("sorting", "tokens"), address_of())
        counts = _counts_of(store)
        seal_store(
            store, contents.name, tokenizer,
            {"plan": plan, "segment_tokens": contents.segment_tokens},
            contents.corpus | {"fingerprint": plan["documents"]}, counts, on_bytes=progress("hashing", "bytes"),
        )  # fmt: skip
        return ReadReport(counts["documents"])

    return build_store(out, plan, contents.name, False, fill, sources=lambda: contents.sources)


def _open_base(path: Path, tokenizer: TextTokenizer) -> RestStore:
    """Open a store whose documents would get the same digests and ids today."""
    store = RestStore.open(path, tokenizer.identity)
    made = store.manifest.parameters.get("plan", {})
    for key, value in made_with(tokenizer).items():
        if made.get(key) != value:
            raise StoreError(f"{path} was built with another {key}: its documents are tokenized again")
    return store


class _OldSegment(NamedTuple):
    """A segment of the base: where its documents start and end, their digests, and which ones remain."""

    rows: Rows
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    all_digests: NDArray[np.uint8]
    remain: NDArray[np.bool_]

    @property
    def size(self) -> int:
        """Tokens of the remaining documents, with their sentinels."""
        return int((self.ends - self.starts)[self.remain].sum())

    @property
    def digests(self) -> NDArray[np.uint8]:
        """Digests of the remaining documents."""
        return self.all_digests[self.remain]

    def pieces(self) -> Iterator[Piece]:
        """Yield the remaining documents, neighbours together."""
        for start, end, remain in self._runs():
            if remain:
                tokens = self.rows.tokens[self.starts[start] : self.ends[end - 1]]
                yield Piece(tokens, self.all_digests[start:end])

    def gaps(self) -> NDArray[np.int64]:
        """Return int64 [k, 2], start and end of the removed tokens."""
        gaps = [(self.starts[start], self.ends[end - 1]) for start, end, remain in self._runs() if not remain]
        return np.array(gaps, np.int64).reshape(-1, 2)

    def _runs(self) -> Iterator[tuple[int, int, bool]]:
        """Yield runs of documents that all remain or are all removed: first, end (exclusive), whether they remain."""
        changes = np.flatnonzero(np.diff(self.remain)) + 1
        for start, end in pairwise([0, *changes.tolist(), len(self.remain)]):
            if start < end:
                yield start, end, bool(self.remain[start])


def _segments_of(store: RestStore, wanted: NDArray[np.uint8]) -> list[_OldSegment]:
    """Return the segments of a store, after checking that its digests match its documents in number."""
    index, digests = store.index, read_digests(store.path)
    remain = np.isin(digest_keys(digests), digest_keys(wanted))
    segments, first = [], 0
    for segment, (base, length, _) in enumerate(index.segments.tolist()):
        tokens = index.tokens[base : base + length]
        ends = np.flatnonzero(tokens == sentinel(tokens.dtype)) + 1
        last = first + len(ends)
        if len(ends) == 0 or ends[-1] != length or last > len(digests):
            raise StoreError(
                f"segment {segment} of {store.path} is damaged: its documents do not match documents.bin"
            )
        rows = Rows(tokens, index.suffixes[base : base + length], index.first_rows[segment])
        starts = np.append(0, ends[:-1])
        segments.append(_OldSegment(rows, starts, ends, digests[first:last], remain[first:last]))
        first = last
    if first != len(digests):
        raise StoreError(f"{store.path} is damaged: it has {first:,} documents, but {len(digests):,} digests")
    return segments


def _require_all(
    contents: Contents, remaining: Iterable[NDArray[np.uint8]], added: TokenShards | None
) -> None:
    wanted = digest_keys(contents.digests)
    new = [digest_keys(digests) for digests in added.digests()] if added else []
    old = [digest_keys(digests) for digests in remaining]
    found = np.concatenate([wanted[:0], *old, *new])
    missing, foreign = np.setdiff1d(wanted, found), np.setdiff1d(found, wanted)
    twice = len(np.intersect1d(np.concatenate([wanted[:0], *old]), np.concatenate([wanted[:0], *new])))
    if len(missing) or len(foreign) or twice:
        raise BuildError(
            f"{len(missing):,} wanted documents are neither in the old store nor among the new ones, {len(foreign):,} "
            f"new ones are not wanted, and {twice:,} are in both: tokenize what the old store lacks"
        )
    if not len(wanted):
        raise BuildError("there are no wanted documents: nothing to build from")


def _neighbours(segments: list[_OldSegment], segment_tokens: int) -> list[list[_OldSegment]]:
    """Return the old segments that form each new one: neighbours that fit together, the largest first."""
    groups: list[list[_OldSegment]] = []
    for old in segments:
        if old.size == 0:
            continue
        if groups and sum(other.size for other in groups[-1]) + old.size <= segment_tokens:
            groups[-1].append(old)
        else:
            groups.append([old])
    return [sorted(group, key=lambda old: -old.size) for group in groups]


def _contents_of(
    groups: list[list[_OldSegment]], added: TokenShards | None, segment_tokens: int
) -> Iterator[Iterable[Piece]]:
    merged = [chain.from_iterable(old.pieces() for old in group) for group in groups]
    yield from merged[:-1]
    if added is None:
        yield from merged[-1:]
        return
    room = segment_tokens - sum(old.size for old in groups[-1]) if groups else None
    new = cut_segments(added, segment_tokens, room)
    if merged:
        yield chain(merged[-1], next(new, ()))
    yield from new


def _merge_segments(groups: list[list[_OldSegment]], store: Path, vocab_size: int, threads: int) -> list[int]:
    """Fill the segments whose documents are mostly those of one old segment; return the others."""
    dtype, table = token_dtype(vocab_size), read_segments(store).tolist()
    pending = list(range(len(table)))
    for segment, (group, (start, length, first_key)) in enumerate(zip(groups, table, strict=False)):
        old = group[0]
        if length - old.size > MERGED_SHARE * old.size:
            continue
        tokens = np.memmap(store / "tokens.bin", dtype, "r", start * dtype.itemsize, (length,))
        suffixes = np.memmap(store / "suffixes.bin", "<i4", "r+", start * 4, (length,))
        keys, first_rows = merge_segment(old.rows, old.gaps(), tokens, suffixes, threads)
        suffixes.flush()
        write_at(store / "keys.bin", keys, first_key)
        write_at(store / "first_rows.bin", first_rows, segment * (vocab_size + 1))
        pending.remove(segment)
    return pending


def _counts_of(store: Path) -> dict[str, int]:
    segments = read_segments(store)
    total = int(segments[:, 1].sum())
    # a split document has several digests
    digests = digest_keys(np.fromfile(store / DOCUMENTS_FILE, np.uint8))
    documents, tokens = len(np.unique(digests)), total - len(digests)
    return {"documents": documents, "tokens": tokens, "entries": total, "segments": len(segments)}
