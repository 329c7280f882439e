"""From texts to token shards, for every build that starts from texts; and token shards as a store of their own.

In the working directory of a build (draftstore.storage.staging) lie

    tokens/              token shards (draftstore.text.encoding)
    report.json          marker: every document was read; what was left out

A store of kind `tokens` holds the shards, the report and the tokenizer. Another build of the same corpus takes them
from there instead of reading the texts again.
"""

import dataclasses
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Self

from draftstore.errors import BuildError, NoTextError
from draftstore.storage.files import link_or_copy, remove
from draftstore.storage.manifest import (
    MANIFEST_NAME,
    TOKENIZER_FOLDER,
    Manifest,
    load_manifest,
    save_manifest,
)
from draftstore.storage.report import ReadReport, RecordProblem
from draftstore.storage.staging import STORE, BuildResult, build_store, build_time, hash_files, once
from draftstore.text.corpus import SOURCE_PATTERNS, corpus_fingerprint, read_corpus
from draftstore.text.encoding import tokenize_corpus
from draftstore.text.tokenizer import TextTokenizer
from draftstore.text.tokens import TokenShards

KIND = "tokens"
SHARDS = "tokens"
REPORT = "report.json"

TokenProgress = Callable[[int, int, int], None]


@dataclasses.dataclass(frozen=True)
class CorpusOptions:
    """What is read, and how.

    Attributes:
        corpus: files and folders.
        name: name of the store, for people.
        column: key or column of the text in records.
        glob: which files of a folder are read.
        strict: end at the first bad record.
        fingerprint: identity of the corpus files and of how they are read, once `settled`; every build looks at the
            files for itself, if None.
    """

    corpus: tuple[Path, ...]
    name: str
    column: str = "text"
    glob: tuple[str, ...] = SOURCE_PATTERNS
    strict: bool = False
    fingerprint: str | None = dataclasses.field(default=None, kw_only=True)

    def inputs(self) -> str:
        """Identity of the corpus files and of how they are read."""
        if self.fingerprint is not None:
            return self.fingerprint
        return corpus_fingerprint(self.corpus, glob=self.glob, column=self.column, strict=self.strict)

    def settled(self) -> Self:
        """Return the same with the identity that the corpus has now, for several builds of one corpus."""
        return dataclasses.replace(self, fingerprint=self.inputs())


def corpus_plan(options: CorpusOptions, tokenizer: TextTokenizer) -> dict[str, Any]:
    """Return what decides the ids of a corpus, as JSON values: a part of the plan of every build from texts."""
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
    on_progress: TokenProgress = lambda _documents, _tokens, _characters: None,
) -> BuildResult:
    """Tokenize a corpus into a store of shards, or go on with an interrupted call of the same.

    Args:
        options: what is read.
        tokenizer: makes the token ids; a copy goes into the store.
        out: directory of the store; its parent is made if absent.
        overwrite: replace a store that is there.
        on_progress: told documents, tokens and characters so far.

    Raises:
        BuildError: `out` holds something else, or another build is at work there.
        CorpusError: the corpus cannot be read, or holds no text.
    """
    plan = {"kind": KIND, **corpus_plan(options, tokenizer)}

    def fill(partial: Path) -> ReadReport:
        texts = tokenize_into(partial, options, tokenizer, plan, on_progress=on_progress)
        store = partial / STORE
        remove(store)
        store.mkdir()
        for path in [*(partial / SHARDS).iterdir(), partial / REPORT]:
            link_or_copy(path, store / path.name)
        finish_store(store, texts, plan, {}, {"entries": len(texts.shards.shards)})
        return texts.report

    return build_store(out, plan, options.name, overwrite, fill)


class Tokenized(NamedTuple):
    """A corpus as token ids, and what made them.

    Attributes:
        options: how it was read.
        tokenizer: made the ids.
        shards: the ids.
        report: what was left out.
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
    on_progress: TokenProgress,
) -> Tokenized:
    """Tokenize a corpus in the working directory of a build, or go on with what is there.

    Args:
        partial: the working directory.
        options: what is read.
        tokenizer: makes the token ids.
        plan: of the build, `corpus_plan` being a part of it.
        taken: a store of the corpus's shards (`build_tokens`), which are taken instead of reading the texts.
        on_progress: told documents, tokens and characters so far.

    Raises:
        CorpusError: the corpus cannot be read, or holds no text.
        StoreError: the store of shards cannot be opened.
        BuildError: it holds shards of another corpus, or of another tokenizer.
    """
    if taken is not None:
        _take_tokens(taken, partial, plan)
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
            partial / SHARDS,
            corpus_fingerprint=f"{plan['inputs']} {plan['template']}",
            source=", ".join(map(str, options.corpus)),
            on_progress=on_progress,
        )
    except NoTextError as error:
        reasons = report.absence()
        raise NoTextError(f"{error}: {reasons}" if reasons else str(error)) from None
    return Tokenized(options, tokenizer, shards, _settle_report(partial / REPORT, report))


def _take_tokens(source: Path, partial: Path, plan: dict[str, Any]) -> None:
    """Put the shards of a store of kind `tokens` into the working directory of a build, unless some are there.

    Raises:
        StoreError: it cannot be opened.
        BuildError: its shards are of another corpus, or of another tokenizer.
    """
    manifest = load_manifest(source, KIND)
    for key in ("inputs", "tokenizer", "template"):
        if manifest.parameters["plan"][key] != plan[key]:
            raise BuildError(
                f"the shards in {source} differ in {key} from this build: tokenize the corpus again"
            )
    if (partial / SHARDS).exists():
        return
    filling = partial / f"{SHARDS}.taken"  # whole or absent, as all that a build goes on from
    remove(filling)
    filling.mkdir()
    for name in manifest.files:
        if "/" not in name and name != REPORT:
            link_or_copy(source / name, filling / name)
    (partial / REPORT).unlink(missing_ok=True)
    link_or_copy(source / REPORT, partial / REPORT)
    filling.rename(partial / SHARDS)


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
    """Complete a store that was built from texts: put the tokenizer in it, and last the manifest.

    Args:
        store: a directory with all other files of the store; what an earlier attempt completed is replaced.
        texts: the corpus.
        plan: of the build.
        parameters: of the manifest, beside the plan.
        counts: of the manifest, beside documents and tokens.
        target_model: id of the model that the store is bound to.
        on_bytes: told the bytes hashed and those in all.
    """
    options, tokenizer, shards, report = texts
    for path in [store / TOKENIZER_FOLDER, store / MANIFEST_NAME, *store.glob(".*")]:
        remove(path)
    (store / TOKENIZER_FOLDER).mkdir()
    tokenizer.save(store / TOKENIZER_FOLDER)
    content = [entry.sha256 for shard in shards.shards for _, entry in sorted(shard.files.items())]
    manifest = Manifest(
        kind=plan["kind"],
        name=options.name,
        created=build_time(),
        vocab_size=shards.vocab_size,
        token_dtype=shards.dtype.name,
        tokenizer=tokenizer.identity,
        parameters={"plan": plan, **parameters},
        corpus={
            "fingerprint": hashlib.sha256("".join(content).encode()).hexdigest(),
            "sources": [str(path) for path in options.corpus],
            "characters": shards.character_count,
            "bad_records": report.bad_records,
            "empty_documents": report.empty_documents,
            "unread": report.unread,
            "passed_over": report.passed_over,
        },
        counts={"documents": shards.document_count, "tokens": shards.token_count, **counts},
        files=hash_files(store, on_bytes),
        target_model=target_model,
    )
    save_manifest(store, manifest)
    return manifest


def _settle_report(marker: Path, report: ReadReport) -> ReadReport:
    """Keep what reading the corpus met, or return what an earlier attempt that read it met."""
    read_anew = report.documents > 0
    fields = once(marker, lambda: dataclasses.asdict(report), still=lambda _: not read_anew)
    return ReadReport(**{**fields, "problems": [RecordProblem(**problem) for problem in fields["problems"]]})
