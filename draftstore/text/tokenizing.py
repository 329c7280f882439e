"""Builds from text: a corpus becomes token shards, resumable after every shard, which a store is made from and sealed.

The working directory of a build (draftstore.storage.staging) contains

    tokens/              token shards (draftstore.text.tokens), written in batches on all cores
    report.json          marker that every document was read, with what was skipped

A store of kind `tokens` has the shards, the report and the tokenizer. Other builds of the same corpus use it instead of
reading the texts again.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeAlias

from pydantic import Field

from draftstore.errors import BuildError, CorpusError, NoTextError
from draftstore.options import Options, Shown
from draftstore.storage.files import link_or_copy, remove
from draftstore.storage.manifest import (
    MANIFEST_NAME,
    TOKENIZER_FOLDER,
    Manifest,
    load_manifest,
    save_manifest,
)
from draftstore.storage.report import REPORTS, OnProgress, ReadReport, ignore
from draftstore.storage.staging import STORE, BuildResult, build_store, build_time, hash_files, once
from draftstore.text.chat import DOCUMENT_DATE
from draftstore.text.corpus import SOURCE_PATTERNS, corpus_fingerprint, find_files, read_corpus
from draftstore.text.digests import IDENTITY
from draftstore.text.records import Document, Render
from draftstore.text.tokenizer import TextTokenizer
from draftstore.text.tokens import (
    Filling,
    Shard,
    State,
    TokenShards,
    finish_shards,
    open_shards,
    resume_shards,
    token_dtype,
)

KIND = "tokens"
SHARDS = "tokens"
REPORT = "report.json"

SHARD_TOKENS = 4_000_000
BATCH_CHARACTERS = 1_000_000
PIECE_CHARACTERS = 1 << 17
"""Maximum characters of a piece: BPE without a pre-tokenizer slows down with length, and pieces run in parallel."""

TextPiece: TypeAlias = tuple[str, str, bytes | None]
"""The id of a document, a piece of its text, and the digest; None: more pieces follow."""
CORPUS = (
    "A file or folder; may be repeated. Files: JSON Lines (.jsonl, .ndjson, .json) or .parquet with `text`, `messages` "
    "or `conversations`; text and source files; all but .parquet also compressed (.gz, .bz2, .xz, .zst). In a folder, "
    "the uncompressed text and source files are read, or those that match `glob`, without hidden ones."
)


class BuildTexts(NamedTuple):
    """The texts of one or several builds, as they are now.

    Attributes:
        inputs: identity of the texts and of how they are read.
        read: returns the documents; renders conversations with the first argument, and adds to the report.
        place: names them in errors.
        files: returns their files; the store is readable only by users who may read all of them.
        facts: additions to `Manifest.corpus`, besides the fingerprint.
        order: identity of the documents' order and ids, if `inputs` does not determine it; if it changes, an
            interrupted build tokenizes them again.
        shards: existing store of their token shards (`build_tokens`) to use instead of reading them; None: read them.
    """

    inputs: str
    read: Callable[[Render, ReadReport], Iterator[Document]]
    place: str
    files: Callable[[], Sequence[Path]]
    facts: dict[str, Any]
    order: str = ""
    shards: Path | None = None

    def plan(self, tokenizer: TextTokenizer) -> dict[str, Any]:
        """Return everything that determines their ids, as JSON values; part of the plan of builds from text."""
        return {"inputs": self.inputs, **made_with(tokenizer)}


class ReadOptions(Options):
    """How a corpus is read."""

    column: str = Field(
        "text",
        min_length=1,
        description="Key or column of the text in a record; else `messages` or `conversations` are read.",
        examples=["text", "content"],
    )
    glob: Annotated[tuple[str, ...], Shown(unset="text and source", metavar="PATTERN...")] = Field(
        (),
        description="Files of a folder to read, by name or relative path, such as '*.jsonl'; may be repeated.",
        examples=[["*.md", "src/**/*.py"]],
    )
    strict: bool = Field(False, description="Stop at the first bad record instead of counting it.")
    allow_truncated: bool = Field(
        False, description="Build from truncated or damaged files, up to the damage, instead of failing."
    )


class Named(Options):
    """The name of a store; by default, the name of its directory."""

    name: Annotated[str, Shown(unset="the directory's")] = Field(
        "", description="Display name of the store.", examples=["chat-vicuna"]
    )


class CorpusOptions(ReadOptions, Named):
    """A corpus and the name of its store."""

    corpus: Annotated[tuple[Path, ...], Shown(metavar="PATH...")] = Field(description=CORPUS)

    def texts(self) -> BuildTexts:
        """Return the texts of the corpus, with its current identity; CorpusError if a file is missing or unknown."""
        how: dict[str, Any] = {
            "column": self.column,
            "strict": self.strict,
            "allow_truncated": self.allow_truncated,
        }

        patterns = self.glob or SOURCE_PATTERNS

        def read(render: Render, report: ReadReport) -> Iterator[Document]:
            return read_corpus(self.corpus, render=render, report=report, glob=patterns, **how)

        return BuildTexts(
            corpus_fingerprint(self.corpus, glob=patterns, **how),
            read,
            ", ".join(map(str, self.corpus)),
            lambda: [file.path for file in find_files(self.corpus, patterns)],
            {"sources": [str(path) for path in self.corpus]},
        )


def made_with(tokenizer: TextTokenizer) -> dict[str, Any]:
    """Return what determines a document's ids and identity besides its record, as JSON values; part of every plan."""
    return {
        "tokenizer": tokenizer.fingerprint,
        "template": tokenizer.template_fingerprint,
        "identity": IDENTITY,
        "date": DOCUMENT_DATE.date().isoformat(),
    }


class TextBuild:
    """A build from text.

    Attributes:
        plan: everything that determines the bytes of the store, as JSON values.
        report: what was skipped, once `fill` has returned.
    """

    def __init__(
        self,
        texts: BuildTexts,
        name: str,
        tokenizer: TextTokenizer,
        plan: dict[str, Any],
        *,
        on_progress: OnProgress = ignore,
    ) -> None:
        """Plan a build; `plan` is everything else that determines the bytes of the store, including `kind`."""
        self.plan = {**plan, **texts.plan(tokenizer)}
        self.report = ReadReport()
        self._texts, self._name, self._tokenizer = texts, name, tokenizer
        self._on_progress = on_progress

    def fill(self, partial: Path) -> TokenShards:
        """Tokenize the corpus in a build's working directory, resuming from any finished shards.

        CorpusError if the corpus cannot be read or has no text; BuildError if the store of shards is another's.
        """
        source = self._texts.shards
        try:
            shards = self._take(partial, source) if source else self._tokenize(partial)
        except NoTextError as error:
            reasons = self.report.absence()
            raise NoTextError(f"{error}: {reasons}" if reasons else str(error)) from None
        anew = self.report.documents > 0  # otherwise an earlier attempt has read the corpus
        notes = once(partial / REPORT, lambda: dataclasses.asdict(self.report), is_valid=lambda _: not anew)
        self.report = REPORTS.validate_python(notes)
        self._shards = shards
        return shards

    def _take(self, partial: Path, source: Path) -> TokenShards:
        found = load_manifest(source, KIND).parameters["plan"]
        for key, value in self._texts.plan(self._tokenizer).items():
            if found.get(key) != value:
                raise BuildError(
                    f"the shards in {source} differ in {key} from this build: tokenize the corpus again"
                )
        (partial / REPORT).unlink(missing_ok=True)
        link_or_copy(source / REPORT, partial / REPORT)
        return open_shards(source)

    def _tokenize(self, partial: Path) -> TokenShards:
        texts, tokenizer = self._texts, self._tokenizer
        documents = texts.read(tokenizer.render_document, self.report)
        return tokenize_corpus(
            documents,
            tokenizer,
            partial / SHARDS,
            corpus_fingerprint=json.dumps(texts.plan(tokenizer)) + (f" {texts.order}" if texts.order else ""),
            source=texts.place,
            on_progress=self._on_progress,
        )

    def seal(
        self, store: Path, parameters: dict[str, Any], counts: dict[str, int], **options: Any
    ) -> Manifest:
        """Complete the store (`seal_store`), adding the plan to its parameters, documents and tokens to its counts."""
        shards = self._shards
        content = [entry.sha256 for shard in shards.shards for _, entry in sorted(shard.files.items())]
        facts = {
            "fingerprint": hashlib.sha256("".join(content).encode()).hexdigest(),
            "characters": shards.character_count,
            **self.report.facts(),
            **self._texts.facts,
        }
        counts = {"documents": shards.document_count, "tokens": shards.token_count, **counts}
        parameters = {"plan": self.plan, **parameters}
        return seal_store(store, self._name, self._tokenizer, parameters, facts, counts, **options)


def seal_store(
    store: Path,
    name: str,
    tokenizer: TextTokenizer,
    parameters: dict[str, Any],
    corpus: dict[str, Any],
    counts: dict[str, int],
    *,
    target_model: str | None = None,
    on_bytes: OnProgress = ignore,
) -> Manifest:
    """Complete a store of token ids: add the tokenizer, then the manifest; what an earlier attempt left is replaced."""
    for path in [store / TOKENIZER_FOLDER, store / MANIFEST_NAME, *store.glob(".*")]:
        remove(path)
    (store / TOKENIZER_FOLDER).mkdir()
    tokenizer.save(store / TOKENIZER_FOLDER)
    manifest = Manifest(
        kind=parameters["plan"]["kind"],
        name=name,
        created=build_time(),
        vocab_size=tokenizer.vocab_size,
        token_dtype=token_dtype(tokenizer.vocab_size).name,
        tokenizer=tokenizer.identity,
        parameters=parameters,
        corpus=corpus,
        counts=counts,
        files=hash_files(store, on_bytes),
        target_model=target_model,
    )
    save_manifest(store, manifest)
    return manifest


def build_tokens(
    texts: BuildTexts,
    name: str,
    tokenizer: TextTokenizer,
    out: Path,
    *,
    overwrite: bool = False,
    on_progress: OnProgress = ignore,
) -> BuildResult:
    """Tokenize a corpus into a store of shards at `out`, or resume an interrupted call.

    BuildError if `out` is something else, or another build is running there; CorpusError if there is no text.
    """
    build = TextBuild(texts, name, tokenizer, {"kind": KIND}, on_progress=on_progress)

    def fill(partial: Path) -> ReadReport:
        shards, store = build.fill(partial), partial / STORE
        remove(store)
        store.mkdir()
        for path in [*(partial / SHARDS).iterdir(), partial / REPORT]:
            link_or_copy(path, store / path.name)
        build.seal(store, {}, {"entries": len(shards.shards)})
        return build.report

    return build_store(out, build.plan, name, overwrite, fill, sources=texts.files)


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
        _skip(documents, shards, source)
        filling = Filling(state.vocab_size)
        filling.report(shards, on_progress)
        for batch in _read_ahead(_batches(documents, batch_chars)):
            encoded = tokenizer.encode_documents([text for _, text, _ in batch])
            for (name, text, digest), ids in zip(batch, encoded, strict=True):
                filling.add(name, text, ids, digest)
                if digest is not None and filling.tokens >= shard_tokens:
                    shards.append(filling.write(directory, len(shards)))
                    filling = Filling(state.vocab_size)
            filling.report(shards, on_progress)
        if filling.digests:
            shards.append(filling.write(directory, len(shards)))
        finish_shards(directory, state, shards)
    made = open_shards(directory)
    if made.token_count == 0:
        raise NoTextError(f"no text found in {source}")
    return made


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


def _skip(documents: Iterator[Document], shards: Sequence[Shard], source: str) -> None:
    """Skip the documents of finished shards; CorpusError if they are others."""
    for shard in shards:
        ids = [document.id for document in islice(documents, shard.documents)]
        if len(ids) != shard.documents or (ids[0], ids[-1]) != (shard.first_id, shard.last_id):
            raise CorpusError(
                f"{source} changed since the build was interrupted (documents {shard.first_id!r} to "
                f"{shard.last_id!r} have moved): remove the unfinished shards and start again"
            )
