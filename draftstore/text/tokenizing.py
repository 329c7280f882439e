"""Tokenizing for all builds that start from texts, and token shards as a store of their own.

The working directory of a build (draftstore.storage.staging) contains

    tokens/              token shards (draftstore.text.encoding)
    parts/               on a pool: what its processes have tokenized (draftstore.text.parts)
    report.json          marker: every document was read; what was skipped

A store of kind `tokens` has the shards, the report and the tokenizer. Other builds of the same corpus use it instead of
reading the texts again.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial as partial_of
from pathlib import Path
from typing import Any, NamedTuple, Self

from draftstore.errors import BuildError, NoTextError, StoreError
from draftstore.mapping import Pool
from draftstore.storage.files import link_or_copy, remove
from draftstore.storage.manifest import TOKENIZER_FOLDER, Manifest, load_manifest
from draftstore.storage.report import ReadReport
from draftstore.storage.staging import STORE, BuildResult, build_store, once
from draftstore.text.corpus import SOURCE_PATTERNS, corpus_fingerprint, find_files, list_files, read_corpus
from draftstore.text.encoding import tokenize_corpus, write_shards
from draftstore.text.parts import PART_BYTES, Reading, tokenize_parts
from draftstore.text.records import Document
from draftstore.text.sealing import seal_store
from draftstore.text.tokenizer import TextTokenizer
from draftstore.text.tokens import TokenShards, open_shards

KIND = "tokens"
SHARDS = "tokens"
PARTS = "parts"
REPORT = "report.json"

TokenProgress = Callable[[int, int, int], None]


class Gathered(NamedTuple):
    """Documents that the caller has chosen, in place of files to read.

    Attributes:
        read: returns them.
        order: identity of their order and ids; an interrupted build with another one tokenizes them again.
        files: where they come from: who may not read these files may not read the store.
        facts: for the manifest, see `Manifest.corpus`; the fingerprint is added.
    """

    read: Callable[[], Iterator[Document]]
    order: str
    files: tuple[Path, ...]
    facts: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class CorpusOptions:
    """The corpus, and how it is read.

    Attributes:
        corpus: files and folders.
        name: display name of the store.
        column: key or column of the text in records.
        glob: which files of a folder are read.
        strict: whether to stop at the first bad record.
        allow_truncated: whether to go on after a file that cannot be read to its end.
        rehash: whether to read large files to see whether they changed, even where their times say they did not.
        fingerprint: identity of the corpus files and of how they are read, set by `settled`; None: every build computes
            it.
        gathered: the documents themselves, whose identity is `fingerprint`; None: they are read from the files.
    """

    corpus: tuple[Path, ...]
    name: str
    column: str = "text"
    glob: tuple[str, ...] = SOURCE_PATTERNS
    strict: bool = False
    allow_truncated: bool = dataclasses.field(default=False, kw_only=True)
    rehash: bool = dataclasses.field(default=False, kw_only=True)
    fingerprint: str | None = dataclasses.field(default=None, kw_only=True)
    gathered: Gathered | None = dataclasses.field(default=None, kw_only=True)

    def files(self) -> list[Path]:
        """Return the files of the corpus."""
        if self.gathered is not None:
            return list(self.gathered.files)
        return [file.path for file in list_files(self.corpus, self.glob)]

    def inputs(self) -> str:
        """Identity of the corpus files and of how they are read."""
        if self.fingerprint is not None:
            return self.fingerprint
        return corpus_fingerprint(
            self.corpus,
            glob=self.glob,
            rehash=self.rehash,
            column=self.column,
            strict=self.strict,
            allow_truncated=self.allow_truncated,
        )

    def settled(self) -> Self:
        """Return a copy with the corpus' present identity, for several builds of one corpus."""
        return dataclasses.replace(self, fingerprint=self.inputs())


def corpus_plan(options: CorpusOptions, tokenizer: TextTokenizer) -> dict[str, Any]:
    """Return everything that determines the ids of a corpus, as JSON values; part of the plan of builds from texts."""
    return {
        "inputs": options.inputs(),
        "tokenizer": tokenizer.fingerprint,
        "template": tokenizer.template_fingerprint,
    }


def build_tokens(
    options: CorpusOptions,
    tokenizer: TextTokenizer,
    out: Path,
    *,
    overwrite: bool = False,
    pool: Pool | None = None,
    on_progress: TokenProgress = lambda _documents, _tokens, _characters: None,
) -> BuildResult:
    """Tokenize a corpus into a store of shards, or resume an interrupted call.

    Args:
        options: corpus and how it is read.
        tokenizer: its tokenizer; a copy goes into the store.
        out: directory of the store; its parent is created if missing.
        overwrite: whether to replace an existing store.
        pool: processes that tokenize; None: this one, on all cores.
        on_progress: called with documents, tokens and characters so far.

    Raises:
        BuildError: `out` is something else, or another build is running there.
        CorpusError: the corpus cannot be read or has no text.
    """
    plan = {"kind": KIND, **corpus_plan(options, tokenizer)}

    def fill(partial: Path) -> ReadReport:
        texts = tokenize_into(partial, options, tokenizer, plan, pool=pool, on_progress=on_progress)
        store = partial / STORE
        remove(store)
        store.mkdir()
        for path in [*(partial / SHARDS).iterdir(), partial / REPORT]:
            link_or_copy(path, store / path.name)
        finish_store(store, texts, plan, {}, {"entries": len(texts.shards.shards)})
        return texts.report

    return build_store(out, plan, options.name, overwrite, fill, sources=options.files)


class Tokenized(NamedTuple):
    """A corpus as token ids, and its origin.

    Attributes:
        options: how it was read.
        tokenizer: its tokenizer.
        shards: the ids.
        report: what was skipped.
    """

    options: CorpusOptions
    tokenizer: TextTokenizer
    shards: TokenShards
    report: ReadReport


def tokenize_into(
    partial: Path,
    options: CorpusOptions,
    tokenizer: TextTokenizer,
    plan: dict[str, Any],
    *,
    taken: Path | None = None,
    pool: Pool | None = None,
    on_progress: TokenProgress,
) -> Tokenized:
    """Tokenize a corpus in a build's working directory, or resume there.

    Args:
        partial: the working directory.
        options: corpus and how it is read.
        tokenizer: its tokenizer.
        plan: plan of the build, including `corpus_plan`.
        taken: existing store of the corpus's shards (`build_tokens`), used instead of the texts.
        pool: processes that tokenize; None: this one, on all cores, as always where documents are gathered.
        on_progress: called with documents, tokens and characters so far.

    Raises:
        CorpusError: the corpus cannot be read or has no text.
        StoreError: the store of shards cannot be opened.
        BuildError: its shards belong to another corpus or tokenizer.
    """
    report = ReadReport()
    if taken is not None:
        shards = _take_tokens(taken, partial, plan)
        return Tokenized(options, tokenizer, shards, _settle_report(partial / REPORT, report))
    tokenize = _tokenize_here if pool is None or options.gathered else partial_of(_tokenize_apart, pool)
    try:
        shards = tokenize(partial, options, tokenizer, plan, report, on_progress)
    except NoTextError as error:
        reasons = report.absence()
        raise NoTextError(f"{error}: {reasons}" if reasons else str(error)) from None
    return Tokenized(options, tokenizer, shards, _settle_report(partial / REPORT, report))


def _tokenize_here(
    partial: Path,
    options: CorpusOptions,
    tokenizer: TextTokenizer,
    plan: dict[str, Any],
    report: ReadReport,
    on_progress: TokenProgress,
) -> TokenShards:
    """Tokenize a corpus in this process, on all cores."""
    if options.gathered is not None:
        documents = options.gathered.read()
    else:
        documents = read_corpus(
            options.corpus,
            render=lambda messages: tokenizer.render_chat(messages, add_generation_prompt=False),
            report=report,
            column=options.column,
            glob=options.glob,
            strict=options.strict,
            allow_truncated=options.allow_truncated,
        )
    return tokenize_corpus(
        documents, tokenizer, partial / SHARDS, **_identity(options, plan), on_progress=on_progress
    )


def _tokenize_apart(
    pool: Pool,
    partial: Path,
    options: CorpusOptions,
    tokenizer: TextTokenizer,
    plan: dict[str, Any],
    report: ReadReport,
    on_progress: TokenProgress,
) -> TokenShards:
    """Tokenize a corpus in parts on a pool, and cut them into shards."""
    pool.require(partial)
    identity = _identity(options, plan)
    parts = (
        partial
        / PARTS
        / hashlib.sha256(f"{identity} {tokenizer.fingerprint} {PART_BYTES}".encode()).hexdigest()
    )
    folder = parts / TOKENIZER_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(folder)
    reading = Reading(
        options.column, options.strict, options.allow_truncated, folder, tokenizer.name, tokenizer.fingerprint
    )
    files = find_files(options.corpus, options.glob, report)
    documents = tokenize_parts(pool, reading, files, parts, report, on_progress)
    shards = write_shards(
        documents, lambda left: ([one] for one in left), tokenizer, partial / SHARDS, **identity
    )
    with suppress(OSError):  # a process that was taken for dead may still write there
        remove(partial / PARTS)
    return shards


def _identity(options: CorpusOptions, plan: dict[str, Any]) -> dict[str, Any]:
    """Return what shards say about their corpus."""
    identity = f"{plan['inputs']} {plan['template']}"
    if options.gathered is not None:
        return {"corpus_fingerprint": f"{identity} {options.gathered.order}", "source": options.name}
    return {"corpus_fingerprint": identity, "source": ", ".join(map(str, options.corpus))}


def _take_tokens(source: Path, partial: Path, plan: dict[str, Any]) -> TokenShards:
    """Copy the shards of a store of kind `tokens` to a build's working directory, unless it has all of them."""
    manifest = load_manifest(source, KIND)
    for key in ("inputs", "tokenizer", "template"):
        if manifest.parameters["plan"][key] != plan[key]:
            raise BuildError(
                f"the shards in {source} differ in {key} from this build: tokenize the corpus again"
            )
    shards = partial / SHARDS
    with suppress(StoreError):
        return open_shards(shards)
    remove(shards)
    filling = partial / f"{SHARDS}.taken"  # whole or absent, as everything that builds resume from
    remove(filling)
    filling.mkdir()
    for name in manifest.files:
        if "/" not in name and name != REPORT:
            link_or_copy(source / name, filling / name)
    (partial / REPORT).unlink(missing_ok=True)
    link_or_copy(source / REPORT, partial / REPORT)
    filling.rename(shards)
    return open_shards(shards)


def finish_store(
    store: Path,
    texts: Tokenized,
    plan: dict[str, Any],
    parameters: dict[str, Any],
    counts: dict[str, int],
    *,
    target_model: str | None = None,
    on_bytes: Callable[[int, int], None] = lambda _done, _all: None,
) -> Manifest:
    """Complete a store built from texts: add the tokenizer, and last the manifest.

    Args:
        store: directory with all other files of the store; files from an earlier attempt are replaced.
        texts: the corpus.
        plan: plan of the build.
        parameters: parameters of the manifest besides the plan.
        counts: counts of the manifest besides documents and tokens.
        target_model: id of the model that the store is bound to.
        on_bytes: called with the bytes hashed and the total.
    """
    options, tokenizer, shards, report = texts
    content = [entry.sha256 for shard in shards.shards for _, entry in sorted(shard.files.items())]
    corpus = {
        "fingerprint": hashlib.sha256("".join(content).encode()).hexdigest(),
        "sources": [str(path) for path in options.corpus],
        "characters": shards.character_count,
        **report.facts(),
        **(options.gathered.facts if options.gathered else {}),
    }
    counts = {"documents": shards.document_count, "tokens": shards.token_count, **counts}
    return seal_store(
        store, options.name, tokenizer, {"plan": plan, **parameters}, corpus, counts,
        target_model=target_model, on_bytes=on_bytes,
    )  # fmt: skip


def _settle_report(marker: Path, report: ReadReport) -> ReadReport:
    """Save the reading report, or return that of an earlier attempt that read the corpus."""
    read_anew = report.documents > 0
    fields = once(marker, lambda: dataclasses.asdict(report), still=lambda _: not read_anew)
    return ReadReport.of_notes(fields)
