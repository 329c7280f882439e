"""Builds from text: a corpus becomes token shards (draftstore.text.sharding), from which a store is made and sealed.

The working directory of a build (draftstore.storage.staging) contains

    tokens/              token shards (draftstore.text.tokens), which are kept when a build is interrupted
    report.json          marker that every document was read, with what was skipped

A store of kind `tokens` has the shards, the report and the tokenizer. Other builds of the same corpus use it instead of
reading the texts again.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from draftstore.cluster import address_of
from draftstore.errors import BuildError, NoTextError
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
from draftstore.text.corpus import SOURCE_PATTERNS, corpus_fingerprint, find_files, group_files, read_files
from draftstore.text.digests import IDENTITY
from draftstore.text.selecting import RecordOptions
from draftstore.text.sharding import REPORT, Group, tokenize_groups
from draftstore.text.tokenizer import TextTokenizer
from draftstore.text.tokens import TokenShards, open_shards, token_dtype

KIND = "tokens"
SHARDS = "tokens"

CORPUS = (
    "A file or folder; may be repeated. Files: JSON Lines (.jsonl, .ndjson, .json) or .parquet with `text`, `messages` "
    "or `conversations`; text and source files; all but .parquet also compressed (.gz, .bz2, .xz, .zst). In a folder, "
    "the uncompressed text and source files are read, or those that match `glob`, without hidden ones."
)


class BuildTexts(NamedTuple):
    """The texts of one or several builds, as they are now.

    Attributes:
        inputs: identity of the texts and of how they are read.
        groups: returns readers of the documents, each of neighbouring files; the report gets what was skipped.
        place: names them in errors.
        files: returns their files; the store is readable only by users who may read all of them.
        facts: additions to `Manifest.corpus`, besides the fingerprint.
        order: identity of the documents' order and ids, if `inputs` does not determine it; if it changes, an
            interrupted build tokenizes them again.
        shards: existing store of their token shards (`build_tokens`) to use instead of reading them; None: read them.
    """

    inputs: str
    groups: Callable[[ReadReport], Sequence[Group]]
    place: str
    files: Callable[[], Sequence[Path]]
    facts: dict[str, Any]
    order: str = ""
    shards: Path | None = None

    def plan(self, tokenizer: TextTokenizer) -> dict[str, Any]:
        """Return everything that determines their ids, as JSON values; part of the plan of builds from text."""
        return {"inputs": self.inputs, **made_with(tokenizer)}


class ReadOptions(RecordOptions):
    """How a corpus is read."""

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
        how: dict[str, Any] = {"strict": self.strict, "allow_truncated": self.allow_truncated}
        records = RecordOptions.of(self)
        patterns = self.glob or SOURCE_PATTERNS

        def groups(report: ReadReport) -> list[Group]:
            return [
                partial(read_files, files, records=records, **how)
                for files in group_files(find_files(self.corpus, patterns, report))
            ]

        return BuildTexts(
            corpus_fingerprint(self.corpus, glob=patterns, **records.deciding, **how),
            groups,
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
        cluster: str | None = None,
        on_progress: OnProgress = ignore,
    ) -> None:
        """Plan a build; `plan` is everything else that determines the bytes of the store, including `kind`.

        `cluster` is the address of one that tokenizes, by default of $DRAFTSTORE_CLUSTER, else this machine.
        """
        self.plan = {**plan, **texts.plan(tokenizer)}
        self.report = ReadReport()
        self._texts, self._name, self._tokenizer = texts, name, tokenizer
        self._cluster, self._on_progress = address_of(cluster), on_progress

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
        return tokenize_groups(
            texts.groups(self.report),
            tokenizer,
            partial / SHARDS,
            report=self.report,
            cluster=self._cluster,
            files=texts.files,
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
