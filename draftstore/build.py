"""Building a REST store from text: tokenize, lay out segments, sort each, publish; resumable at every step.

Work goes on in `.NAME.partial` beside the output, under a lock:

    build.json           what is being built; another corpus, tokenizer or option starts clean
    tokens/              token shards (draftstore.encoding)
    report.json          marker: every document was read; what was left out
    layout.json, sorted-00000, ...   markers of draftstore.segments
    store/               the store, published by one rename

A killed build leaves no store that opens; the same command again goes on after the last marker. A build that
fails before the first token shard is finished leaves nothing. The arrays are the same bytes for the same
input, whatever the number of processes and interruptions.
"""

import dataclasses
import datetime
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from draftstore.corpus import SOURCE_PATTERNS, ReadReport, corpus_fingerprint, read_corpus
from draftstore.encoding import tokenize_corpus
from draftstore.errors import BuildError, DraftstoreError, NoTextError, StoreError
from draftstore.files import locked_directory, publish_directory, remove, retired_name, write_json
from draftstore.manifest import (
    FORMAT_VERSION,
    MANIFEST_NAME,
    FileEntry,
    Manifest,
    load_manifest,
    save_manifest,
)
from draftstore.records import RecordProblem
from draftstore.rest import KIND, TOKENIZER_FOLDER
from draftstore.segments import LAYOUT, lay_out, read_segments, sort_segments
from draftstore.sorting import MAX_SEGMENT_TOKENS
from draftstore.tokenizer import TextTokenizer
from draftstore.tokens import TokenShards

PLAN = "build.json"
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
    """A finished store.

    Attributes:
        path: where it is.
        manifest: what it says of itself.
        report: what was read and what was left out; the problems themselves only where they were met.
        reused: the store was there already.
    """

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
    out = Path(os.path.abspath(out))  # noqa: PTH100 (resolve() would follow a link that should be replaced)
    plan = _plan(options, tokenizer)
    finished = _finished(out, plan, options.name, overwrite)
    if finished is None:
        with _working_directory(out) as partial:
            # Asked again: another build may have ended between the question and the lock.
            finished = _finished(out, plan, options.name, overwrite)
            if finished is None:
                _start(partial, plan)
                report = _fill(partial, options, tokenizer, plan, workers, progress or Progress())
                publish_directory(partial / "store", out)
                return BuildResult(out, load_manifest(out, KIND), report, reused=False)
    elif _leftovers(out):
        with _working_directory(out):
            pass
    corpus = finished.corpus
    report = ReadReport(
        finished.counts["documents"],
        corpus["bad_records"],
        corpus["empty_documents"],
        unread=corpus.get("unread", []),
        passed_over=corpus.get("passed_over", {}),
    )
    return BuildResult(out, finished, report, reused=True)


def _plan(options: RestOptions, tokenizer: TextTokenizer) -> dict[str, Any]:
    """Return what decides the bytes of the store, as JSON values."""
    return {
        "kind": KIND,
        "inputs": options.inputs(),
        "tokenizer": tokenizer.fingerprint,
        "template": tokenizer.template_fingerprint,
        "segment_tokens": options.segment_tokens,
    }


def _finished(out: Path, plan: dict[str, Any], name: str, overwrite: bool) -> Manifest | None:
    """Return the manifest of a store at `out` that this very build made; None if there is one to build.

    Raises:
        BuildError: something else is there, and may not be replaced.
    """
    if not os.path.lexists(out) or (out.is_dir() and not any(out.iterdir())):
        return None
    if overwrite:
        if (out / MANIFEST_NAME).is_file():
            return None
        raise BuildError(f"{out} is not a store, and only stores are overwritten: choose another --out")
    try:
        manifest = load_manifest(out, KIND)
    except StoreError:
        manifest = None
    if manifest is None or manifest.name != name or manifest.parameters.get("plan") != plan:
        raise BuildError(f"{out} exists and is not this build: choose another --out, or pass --overwrite")
    return manifest


def _leftovers(out: Path) -> bool:
    """Tell whether a build was killed between publishing its store and removing what it worked with."""
    partial = _partial_name(out)
    published = (partial / LAYOUT).exists() and not (partial / "store").exists()
    emptied = partial.exists() and not (partial / PLAN).exists()
    return published or emptied or os.path.lexists(retired_name(out))


def _partial_name(out: Path) -> Path:
    return out.with_name(f".{out.name}.partial")


@contextmanager
def _working_directory(out: Path) -> Iterator[Path]:
    """Lock the working directory; remove it, and what publishing left, if the work in it succeeds.

    It is removed also if the work failed without anything to go on from.
    """
    partial = _partial_name(out)
    with locked_directory(partial):
        try:
            yield partial
        except DraftstoreError:
            if not any((partial / "tokens").glob("shard-*.json")):
                _discard(partial)
            raise
        remove(retired_name(out))
        _discard(partial)


def _discard(partial: Path) -> None:
    """Remove the working directory."""
    remove(partial / PLAN)  # first: without it the rest is waste
    remove(partial)


def _start(partial: Path, plan: dict[str, Any]) -> None:
    """Empty the working directory unless it is of this build."""
    marker = partial / PLAN
    state = {"format_version": FORMAT_VERSION, **plan}
    if marker.exists() and json.loads(marker.read_text(encoding="utf-8")) == state:
        return
    for path in partial.iterdir():
        remove(path)
    write_json(marker, state)


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
    store = partial / "store"
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
    paths = sorted(path for path in store.rglob("*") if path.is_file())
    sizes = [path.stat().st_size for path in paths]
    files, done = {}, 0
    for path, size in zip(paths, sizes, strict=True):
        files[path.relative_to(store).as_posix()] = FileEntry.of(path)
        done += size
        progress.hashed(done, sum(sizes))
    segments = read_segments(store)
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


def _now() -> str:
    """Return the time of the build; SOURCE_DATE_EPOCH, if set, makes even manifests reproducible."""
    epoch = os.environ.get("SOURCE_DATE_EPOCH")
    now = datetime.datetime.now(datetime.UTC)
    if epoch:
        now = datetime.datetime.fromtimestamp(int(epoch), datetime.UTC)
    return now.isoformat(timespec="seconds")
