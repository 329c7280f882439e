"""The steps of the flows, without the orchestrator: each finds or makes one store and registers it."""

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

from draftstore.answers.prompts import ResponseOptions
from draftstore.answers.responses import Responder, Responses, make_responses, weights_fingerprint
from draftstore.hf.building import materials
from draftstore.options import Options
from draftstore.storage.manifest import load_manifest, manifest_digest, model_name
from draftstore.stores.building import ModelSources, Workers
from draftstore.stores.crest.counts import KIND as NGRAMS
from draftstore.stores.crest.counts import CountOptions, build_counts
from draftstore.stores.crest.entries import POSTGRES
from draftstore.stores.registry import builder_of
from draftstore.stores.rest.store import KIND as REST
from draftstore.text.tokenizer import TextTokenizer
from draftstore.text.tokenizing import KIND as TOKENS
from draftstore.text.tokenizing import CorpusOptions, build_tokens, corpus_plan
from pipelines.corpora import resolve_corpus, resolve_tokenizer
from pipelines.ledger import Built, Ledger, Request, when_free
from pipelines.parameters import Corpus
from pipelines.places import store_path
from pipelines.progress import Logger, StepLog, StepLogs
from schema.db.home import data_home
from schema.statistics.loading import load_statistics


@dataclasses.dataclass(frozen=True)
class Tokens:
    """The token shards of a corpus and their settings, shared by all stores built from them."""

    built: Built
    options: CorpusOptions
    tokenizer: TextTokenizer
    parameters: dict[str, Any]  # for the catalogue


def make_tokens(ledger: Ledger, name: str, corpus: Corpus, tokenizer: str | None) -> Tokens:
    """Find or make the token shards of a corpus."""
    home = data_home()
    corpus = resolve_corpus(corpus, home)
    loaded = resolve_tokenizer(tokenizer, home)
    options = CorpusOptions.of(corpus, corpus=tuple(corpus.paths), name=name).settled()
    return tokenize(ledger, options, loaded, corpus.model_dump(mode="json"))


def tokenize(
    ledger: Ledger, options: CorpusOptions, tokenizer: TextTokenizer, parameters: dict[str, Any]
) -> Tokens:
    """Find or make the token shards of the texts that `options` name."""
    path = store_path(data_home(), TOKENS, options.name, **corpus_plan(options, tokenizer))

    def make(_build_id: int, logs: StepLogs) -> None:
        build_tokens(options, tokenizer, path, on_progress=logs.step("tokenizing", "tokens"))

    built = ledger.build(Request(TOKENS, options.name, path, parameters), make)
    return Tokens(built, options, tokenizer, parameters)


def make_store(
    ledger: Ledger, kind: str, options: Any, by: Workers | ModelSources, source: Tokens | Built
) -> Built:
    """Find or build a store of a kind from the token shards of a corpus, or from a REST store.

    `source` determines how texts are read, not `options`; `by` is the number of processes or the model that reads them.
    """
    builder = builder_of(kind)
    assert builder is not None
    own = parameters_of(options, by)
    if isinstance(source, Tokens):
        options = options.model_copy(update={**dict(source.options), "name": options.name})
        made_of, parameters = corpus_plan(options, source.tokenizer), source.parameters | own
    else:
        made_of, parameters = {"source": manifest_digest(source.path)}, own
    path = store_path(data_home(), kind, options.name, **made_of, **own)
    backends = tuple(own.get("backends", ()))

    def make(build_id: int, logs: StepLogs) -> None:
        if isinstance(source, Tokens):
            made = materials(by, tokenizer=source.tokenizer, tokens=source.built.path)
        else:
            made = materials(by, rest=source.path)
        builder.build(options, out=path, progress=logs.step, **made)
        if POSTGRES not in backends:  # with it, the build has loaded them
            load_statistics(build_id, path, progress=logs.step("loading", "n-grams"))

    built = source.built if isinstance(source, Tokens) else source
    return ledger.build(Request(kind, options.name, path, parameters, built.build_id, backends), make)


def parameters_of(options: Options, by: Options) -> dict[str, Any]:
    """Return what determines a store besides its texts and name, as JSON values: its options and the model."""
    own = options.plan(*CorpusOptions.model_fields)
    if isinstance(by, ModelSources):
        weights = weights_fingerprint(by.model)
        own |= {"model": model_name(by.model), "weights": weights, "model_dtype": by.model_dtype}
    return own


def use_rest(ledger: Ledger, path: Path) -> Built:
    """Register a finished REST store, unless it is registered."""
    path = path.resolve()
    manifest = load_manifest(path, REST)
    request = Request(REST, manifest.name, path, manifest.parameters)
    return ledger.build(request, lambda _build_id, _logs: None)


def make_counts(ledger: Ledger, name: str, rest: Built, max_n: int, head: int) -> Built:
    """Find or make the n-gram counts of a REST store, in files and in the database."""
    source = manifest_digest(rest.path)
    path = store_path(data_home(), NGRAMS, name, source=source, max_n=max_n, head=head)

    def make(build_id: int, logs: StepLogs) -> None:
        build_counts(rest.path, path, CountOptions(max_n=max_n), name=name, progress=logs.step)
        load_statistics(build_id, path, head=head, progress=logs.step("loading", "n-grams"))

    request = Request(NGRAMS, name, path, {"max_n": max_n, "head": head}, rest.build_id)
    return ledger.build(request, make)


def make_answers(logger: Logger, name: str, by: Responder, questions: ResponseOptions) -> Responses:
    """Find the answers of a model under a name or decode them; other answers under this name are replaced."""
    path = data_home() / "corpora" / name / "answers.jsonl.zst"
    path.parent.mkdir(parents=True, exist_ok=True)
    decode = partial(
        make_responses, questions, by.model, path,
        dtype=by.dtype, device=by.device, batch=by.batch, overwrite=True,
        on_progress=StepLog(logger, "decoding", "answers"),
    )  # fmt: skip
    made = when_free(decode, path, logger)
    logger.info("answers in %s: %s", path, f"{made.counts['answers']:,}")
    return made
