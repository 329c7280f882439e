"""Tokenization of a corpus into shards, in batches on all cores, resumable after every shard."""

import dataclasses
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from draftstore.errors import CorpusError, NoTextError, StoreError, TokenRangeError, counted
from draftstore.storage.files import fsync_path, load_json, write_json
from draftstore.storage.manifest import FileEntry
from draftstore.storage.report import OnProgress, ignore
from draftstore.text.records import Document
from draftstore.text.tokenizer import TextTokenizer
from draftstore.text.tokens import (
    OFFSET_DTYPE,
    STATE_NAME,
    STATES,
    Shard,
    State,
    TokenShards,
    open_shards,
    read_shard,
    shard_path,
    token_dtype,
    totals_of,
)

SHARD_TOKENS = 4_000_000
BATCH_CHARACTERS = 1_000_000
PIECE_CHARACTERS = 1 << 17
"""Maximum characters of a piece: BPE without a pre-tokenizer slows down with length, and pieces run in parallel."""

TextPiece: TypeAlias = tuple[str, str, bytes | None]
"""The id of a document, a piece of its text, and the digest; None: more pieces follow."""


class Encoded(NamedTuple):
    """The id of a document, characters and token ids [n] of a piece, and the digest; None: more pieces follow."""

    id: str
    characters: int
    ids: NDArray[np.integer[Any]]
    digest: bytes | None


def tokenize_corpus(
    documents: Iterator[Document],
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
    and a document's text. Reading runs one batch ahead, in a thread. A shard ends with the document that fills it, so
    shards depend only on the documents, not on batches, cores or interruptions.

    Args:
        documents: always the same for a given `corpus_fingerprint`; those of finished shards are skipped.
        tokenizer: the tokenizer of the ids.
        directory: used by one process at a time; shards of another tokenizer, corpus or shard size are removed.
        corpus_fingerprint: identity of the corpus and of how it is read (`corpus.corpus_fingerprint`).
        source: name of the corpus in errors.
        shard_tokens: number of tokens at which a shard ends.
        batch_chars: number of characters encoded at a time.
        on_progress: called at the start and after each batch with the tokens so far.

    Raises:
        NoTextError: the corpus has no tokens; the shards are still written and can be opened (`open_shards`).
        CorpusError: the documents differ from those of an interrupted call.
        TokenRangeError: the tokenizer returned an id outside its vocabulary.
    """
    state = State(tokenizer.vocab_size, tokenizer.identity, corpus_fingerprint, shard_tokens)
    directory.mkdir(parents=True, exist_ok=True)
    finished, shards = _resume(directory, state)
    if not finished:
        _skip(documents, shards, source)
        filling = _Filling()
        filling.report(shards, on_progress)
        for batch in _read_ahead(_batches(documents, batch_chars)):
            for piece in _encode(tokenizer, batch):
                filling.add(piece, state.vocab_size)
                if piece.digest is not None and filling.tokens >= shard_tokens:
                    shards.append(filling.write(directory, len(shards)))
                    filling = _Filling()
            filling.report(shards, on_progress)
        if filling.digests:
            shards.append(filling.write(directory, len(shards)))
        done = dataclasses.replace(state, shards=len(shards), totals=totals_of(shards))
        write_json(directory / STATE_NAME, dataclasses.asdict(done))
    made = open_shards(directory)
    if made.token_count == 0:
        raise NoTextError(f"no text found in {source}")
    return made


class _Filling:
    """The documents of an unfinished shard, in memory."""

    def __init__(self) -> None:
        self.ids: list[NDArray[Any]] = []
        self.offsets, self.digests, self.names = [0], list[bytes](), list[str]()
        self.tokens = self.characters = 0

    def report(self, shards: Sequence[Shard], on_progress: OnProgress) -> None:
        """Report the tokens of the finished shards and this one."""
        documents, tokens, _ = totals_of(shards).values()
        on_progress(tokens + self.tokens, None, counted(documents + len(self.digests), "document"))

    def add(self, piece: Encoded, vocab_size: int) -> None:
        """Append the next piece of a document."""
        ids = piece.ids
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
            raise TokenRangeError(
                f"document {piece.id!r} has ids {ids.min():,} to {ids.max():,}, expected 0 to {vocab_size - 1:,}"
            )
        self.ids.append(ids.astype(token_dtype(vocab_size)))
        self.tokens += len(ids)
        self.characters += piece.characters
        if piece.digest is not None:
            self.offsets.append(self.tokens)
            self.digests.append(piece.digest)
            self.names = [*self.names[:1], piece.id]

    def write(self, directory: Path, index: int) -> Shard:
        """Write the shard to disk, its marker last."""
        offsets = np.array(self.offsets, OFFSET_DTYPE)
        parts: dict[str, Sequence[Any]] = {"tokens": self.ids, "offsets": [offsets], "digests": self.digests}
        files = {}
        for suffix, data in parts.items():
            path = shard_path(directory, index, suffix)
            with path.open("wb") as file:
                file.writelines(data)
            fsync_path(path)
            files[path.name] = FileEntry.of(path)
        documents, first, last = len(self.digests), self.names[0], self.names[-1]
        shard = Shard(documents, self.tokens, self.characters, first, last, files)
        write_json(shard_path(directory, index, "json"), dataclasses.asdict(shard))
        return shard


def _encode(tokenizer: TextTokenizer, batch: list[TextPiece]) -> Iterator[Encoded]:
    encoded = tokenizer.encode_documents([text for _, text, _ in batch])
    for (name, text, digest), ids in zip(batch, encoded, strict=True):
        yield Encoded(name, len(text), ids, digest)


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


def _resume(directory: Path, state: State) -> tuple[bool, list[Shard]]:
    """Return whether the directory is complete, and its valid shards; remove invalid ones."""
    path = directory / STATE_NAME
    try:
        found = load_json(path.read_bytes(), STATES)
    except (OSError, ValueError):
        found = None
    shards: list[Shard] = []
    if found is not None and dataclasses.replace(found, shards=None, totals=None) == state:
        with suppress(StoreError):
            while True:
                shards.append(read_shard(directory, len(shards)))
        if found.totals == totals_of(shards):
            return True, shards
    write_json(path, dataclasses.asdict(state))
    kept = {shard_path(directory, index, "json").stem for index in range(len(shards))}
    for old in directory.glob("shard-*.*"):
        if old.stem not in kept:
            old.unlink()
    return False, shards


def _skip(documents: Iterator[Document], shards: list[Shard], source: str) -> None:
    for shard in shards:
        ids = [document.id for document in islice(documents, shard.documents)]
        if len(ids) != shard.documents or (ids[0], ids[-1]) != (shard.first_id, shard.last_id):
            raise CorpusError(
                f"{source} changed since the build was interrupted (documents {shard.first_id!r} to "
                f"{shard.last_id!r} have moved): remove the unfinished shards and start again"
            )
