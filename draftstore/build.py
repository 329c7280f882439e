"""Building a REST store from text: tokenize, lay out segments, sort each; resumable at every step.

In the working directory (draftstore.staging) lie

    tokens/              token shards (draftstore.encoding)
    report.json          marker: every document was read; what was left out
    layout.json, sorted-00000, ...   markers of draftstore.segments

A build that is run again goes on after the last marker; one that fails before the first token shard is finished leaves
nothing. The arrays are the same bytes for the same input, whatever the number of processes and interruptions.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from draftstore.corpus import SOURCE_PATTERNS, ReadReport, corpus_fingerprint, read_corpus
from draftstore.encoding import tokenize_corpus
from draftstore.errors import BuildError, NoTextError
from draftstore.files import remove, write_json
from draftstore.manifest import MANIFEST_NAME, Manifest, save_manifest
from draftstore.records import RecordProblem
from draftstore.rest import KIND, TOKENIZER_FOLDER
from draftstore.segments import lay_out, read_segments, sort_segments
from draftstore.sorting import MAX_SEGMENT_TOKENS
from draftstore.staging import STORE, BuildResult, build_store, build_time, hash_files
from draftstore.tokenizer import TextTokenizer
from draftstore.tokens import TokenShards

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
        overwrite: replace a store that is there, even one of this very build.
        workers: processes that sort segments; all cores by default.
        progress: told how far the build is.

    Raises:
        BuildError: `out` holds something else, another build is at work there, no space, a worker died.
        CorpusError: the corpus cannot be read, or holds no text.
    """
    if not 2 <= options.segment_tokens <= MAX_SEGMENT_TOKENS:
        raise BuildError(
            f"segments of {options.segment_tokens:,} tokens: expected 2 to {MAX_SEGMENT_TOKENS:,}"
        )
    plan = _plan(options, tokenizer)

    def fill(partial: Path) -> ReadReport:
        return _fill(partial, options, tokenizer, plan, workers, progress or Progress())

    return build_store(out, plan, options.name, overwrite, fill)


def _plan(options: RestOptions, tokenizer: TextTokenizer) -> dict[str, Any]:
    """Return what decides the bytes of the store, as JSON values."""
    return {
        "kind": KIND,
        "inputs": options.inputs(),
        "tokenizer": tokenizer.fingerprint,
        "template": tokenizer.template_fingerprint,
        "segment_tokens": options.segment_tokens,
    }


def _fill(
    partial: Path,
    options: RestOptions,
    tokenizer: TextTokenizer,
    plan: dict[str, Any],
    workers: int | None,
    progress: Progress,
) -> ReadReport:
    """Make `partial/store` a whole store."""
    report = ReadReport()
    documents = read_corpus(
        options.corpus,
        render=lambda messages: tokenizer.render_chat(messages, add_generation_prompt=False),
        report=report,
        column=options.column,
        glob=options.glob,
        strict=options.strict,
    )
    try:
        shards = tokenize_corpus(
            documents,
            tokenizer,
            partial / "tokens",
            corpus_fingerprint=f"{plan['inputs']} {plan['template']}",
            source=", ".join(map(str, options.corpus)),
            on_progress=progress.tokenized,
        )
    except NoTextError as error:
        reasons = report.absence()
        raise NoTextError(f"{error}: {reasons}" if reasons else str(error)) from None
    report = _settle_report(partial / "report.json", report)
    store = partial / STORE
    lay_out(shards, store, partial, options.segment_tokens)
    sort_segments(store, partial, shards.vocab_size, workers or os.cpu_count() or 1, progress.sorted)
    # An earlier attempt may have come as far as this, and left other files than arrays.
    for path in [store / TOKENIZER_FOLDER, store / MANIFEST_NAME, *store.glob(".*")]:
        remove(path)
    (store / TOKENIZER_FOLDER).mkdir()
    tokenizer.save(store / TOKENIZER_FOLDER)
    save_manifest(store, _describe(options, tokenizer, shards, store, plan, report, progress))
    return report


def _settle_report(marker: Path, report: ReadReport) -> ReadReport:
    """Keep what reading the corpus met, or return what an earlier attempt that read it met."""
    if report.documents == 0 and marker.exists():
        fields = json.loads(marker.read_text(encoding="utf-8"))
        problems = [RecordProblem(**problem) for problem in fields["problems"]]
        return ReadReport(**{**fields, "problems": problems})
    write_json(marker, dataclasses.asdict(report))
    return report


def _describe(
    options: RestOptions,
    tokenizer: TextTokenizer,
    shards: TokenShards,
    store: Path,
    plan: dict[str, Any],
    report: ReadReport,
    progress: Progress,
) -> Manifest:
    """Hash the files of a finished store and return its manifest."""
    files = hash_files(store, progress.hashed)
    segments = read_segments(store)
    content = [entry.sha256 for shard in shards.shards for _, entry in sorted(shard.files.items())]
    return Manifest(
        kind=KIND,
        name=options.name,
        created=build_time(),
        vocab_size=shards.vocab_size,
        token_dtype=shards.dtype.name,
        tokenizer=tokenizer.identity,
        parameters={"plan": plan, "segment_tokens": options.segment_tokens},
        corpus={
            "fingerprint": hashlib.sha256("".join(content).encode()).hexdigest(),
            "sources": [str(path) for path in options.corpus],
            "characters": shards.character_count,
            "bad_records": report.bad_records,
            "empty_documents": report.empty_documents,
            "unread": report.unread,
            "passed_over": report.passed_over,
        },
        counts={
            "documents": shards.document_count,
            "tokens": shards.token_count,
            "entries": int(segments[:, 1].sum()),
            "segments": len(segments),
        },
        files=files,
    )
