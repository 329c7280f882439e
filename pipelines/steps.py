"""What the flows do, step by step, without the orchestrator: each finds or makes one store and registers it."""

import dataclasses
from pathlib import Path
from typing import Any

from draftstore.build import RestOptions, build_rest
from draftstore.counts import KIND as NGRAMS
from draftstore.counts import build_counts
from draftstore.crest import KIND as CREST
from draftstore.crest_build import CrestOptions, CrestProgress, build_crest
from draftstore.entries import POSTGRES
from draftstore.manifest import load_manifest, manifest_digest
from draftstore.rest import KIND as REST
from draftstore.tokenizing import KIND as TOKENS
from draftstore.tokenizing import CorpusOptions, build_tokens, corpus_plan
from pipelines.corpora import resolve_corpus, resolve_tokenizer
from pipelines.ledger import Ledger, Request
from pipelines.parameters import Corpus
from pipelines.places import store_path
from pipelines.progress import StepLogs
from pipelines.reports import Built
from schema import catalogue
from schema.adding import load_statistics
from schema.home import data_home


def make_tokens(ledger: Ledger, name: str, corpus: Corpus, tokenizer: str | None) -> Built:
    """Find or make the token shards of a corpus.

    Args:
        ledger: of this run.
        name: name of the shards.
        corpus: the texts; those that are on every machine, if it names none.
        tokenizer: where it is; an installed one, if None.

    Raises:
        CorpusError: the corpus cannot be read, or holds no text.
        TokenizerError: the tokenizer cannot be loaded.
        BuildError: another run is at work on the same.
    """
    home = data_home()
    corpus = resolve_corpus(corpus, home)
    loaded = resolve_tokenizer(tokenizer, home)
    options = CorpusOptions(**_fields(corpus, name))
    path = store_path(home, TOKENS, name, **corpus_plan(options, loaded))

    def make(_build_id: int, logs: StepLogs) -> None:
        build_tokens(options, loaded, path, on_progress=logs.rest().tokenized)

    parameters = corpus.model_dump(mode="json")
    return ledger.build(Request(TOKENS, name, path, parameters), make)


def make_rest(
    ledger: Ledger,
    name: str,
    corpus: Corpus,
    tokenizer: str | None,
    tokens: Built,
    segment_tokens: int,
    workers: int | None,
) -> Built:
    """Find or build the REST store of a corpus.

    Args:
        ledger: of this run.
        name: name of the store.
        corpus: the texts; those that are on every machine, if it names none.
        tokenizer: where it is; an installed one, if None.
        tokens: the shards of the corpus.
        segment_tokens: most tokens of a segment.
        workers: most processes that sort; all cores, if None.

    Raises:
        CorpusError: the corpus cannot be read, or holds no text.
        TokenizerError: the tokenizer cannot be loaded.
        BuildError: another run is at work on the same, or there is too little space or memory.
    """
    home = data_home()
    corpus = resolve_corpus(corpus, home)
    loaded = resolve_tokenizer(tokenizer, home)
    options = RestOptions(**_fields(corpus, name), segment_tokens=segment_tokens)
    path = store_path(home, REST, name, **corpus_plan(options, loaded), segment_tokens=segment_tokens)

    def make(_build_id: int, logs: StepLogs) -> None:
        build_rest(options, loaded, path, tokens=tokens.path, workers=workers, progress=logs.rest())

    parameters = {**corpus.model_dump(mode="json"), "segment_tokens": segment_tokens}
    return ledger.build(Request(REST, name, path, parameters, tokens.build_id), make)


def _fields(corpus: Corpus, name: str) -> dict[str, Any]:
    """Return how a corpus is read, as the library's options name it."""
    return {
        "corpus": tuple(corpus.paths),
        "name": name,
        "column": corpus.column,
        "glob": corpus.patterns,
        "strict": corpus.strict,
    }


def use_rest(ledger: Ledger, path: Path) -> Built:
    """Register a finished REST store, unless it is registered.

    Raises:
        StoreError: there is none.
    """
    path = path.resolve()
    manifest = load_manifest(path, REST)
    request = Request(REST, manifest.name, path, manifest.parameters)
    return ledger.build(request, lambda _build_id, _logs: None)


def make_counts(ledger: Ledger, name: str, rest: Built, max_n: int, head: int) -> Built:
    """Find or make the n-gram counts of a REST store, in files and in the database.

    Args:
        ledger: of this run.
        name: name of the counts.
        rest: the store.
        max_n: most tokens of an n-gram.
        head: rows in the database for each n, the most common ones.

    Raises:
        BuildError: another run is at work on the same, or there is too little space.
        DatabaseError: the database cannot be used.
    """
    source = manifest_digest(rest.path)
    path = store_path(data_home(), NGRAMS, name, source=source, max_n=max_n, head=head)

    def make(build_id: int, logs: StepLogs) -> None:
        build_counts(rest.path, path, name=name, max_n=max_n, progress=logs.step("counting", "tokens").amount)
        load_statistics(build_id, path, head=head, progress=logs.step("loading", "n-grams").amount)

    request = Request(NGRAMS, name, path, {"max_n": max_n, "head": head}, rest.build_id)
    return ledger.build(request, make)


def make_crest(ledger: Ledger, options: CrestOptions, rest: Built, workers: int | None) -> Built:
    """Find or build a CREST store, with the n-grams that it keeps in the database.

    Args:
        ledger: of this run.
        options: what is built.
        rest: the store that trees are cut from.
        workers: most threads that cut trees; all cores, if None.

    Raises:
        BuildError: another run is at work on the same, or options that cannot be built.
        DatabaseError: the database cannot be used.
    """
    options.check()
    parameters = {key: value for key, value in dataclasses.asdict(options).items() if key != "name"}
    path = store_path(data_home(), CREST, options.name, source=manifest_digest(rest.path), **parameters)

    def make(build_id: int, logs: StepLogs) -> None:
        progress = CrestProgress(
            counted=logs.step("ranking", "tokens").amount,
            packed=logs.step("packing", "n-grams" if options.max_bytes is None else "bytes").amount,
            loaded=logs.step("loading", "rows").amount,
        )
        build_crest(options, rest.path, path, workers=workers, progress=progress)
        if POSTGRES not in options.backends:
            load_statistics(build_id, path, progress=logs.step("loading", "n-grams").amount)

    request = Request(CREST, options.name, path, parameters, rest.build_id, options.backends)
    return ledger.build(request, make)


def publish(ledger: Ledger, release: str, built: Built) -> None:
    """Have a release point at a build that verifies; in one transaction, and only if it does not yet.

    Raises:
        CatalogueError: the store does not verify.
        DatabaseError: the database cannot be used.
    """
    with ledger.session() as session:
        catalogue.publish(session, release, built.build_id)
    ledger.logger.info("the release %s points at build %d", release, built.build_id)
