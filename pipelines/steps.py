"""The steps of the flows, without the orchestrator: each finds or makes one store and registers it."""

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from draftstore.answers.responses import ResponseOptions, Responses, make_responses, weights_fingerprint
from draftstore.cluster import open_pool
from draftstore.hf.loading import load_model, model_name
from draftstore.storage.manifest import load_manifest, manifest_digest
from draftstore.stores.crest.build import CrestOptions, CrestProgress, build_crest
from draftstore.stores.crest.counts import KIND as NGRAMS
from draftstore.stores.crest.counts import build_counts
from draftstore.stores.crest.entries import POSTGRES
from draftstore.stores.crest.store import KIND as CREST
from draftstore.stores.dresd.build import DresdOptions, DresdProgress, build_dresd
from draftstore.stores.dresd.store import KIND as DRESD
from draftstore.stores.rest.build import RestOptions, build_rest
from draftstore.stores.rest.store import KIND as REST
from draftstore.text.tokenizer import TextTokenizer
from draftstore.text.tokenizing import KIND as TOKENS
from draftstore.text.tokenizing import CorpusOptions, build_tokens, corpus_plan
from pipelines.corpora import resolve_corpus, resolve_tokenizer
from pipelines.ledger import Ledger, Request
from pipelines.parameters import Corpus, Questions
from pipelines.places import store_path
from pipelines.progress import Logger, StepLog, StepLogs
from pipelines.reports import Built
from pipelines.waiting import when_free
from schema.adding import load_statistics
from schema.home import data_home

ANSWERS, LOGGED = "answers.jsonl.zst", "logged.jsonl.zst"
"""Files of answers to prompts, and of logged answers, in a folder with their name."""


@dataclasses.dataclass(frozen=True)
class Tokens:
    """The token shards of a corpus with their settings, which all stores built from them share."""

    built: Built
    options: CorpusOptions
    tokenizer: TextTokenizer
    parameters: dict[str, Any]  # for the catalogue


def make_tokens(
    ledger: Ledger, name: str, corpus: Corpus, tokenizer: str | None, cluster: str | None = None
) -> Tokens:
    """Find or make the token shards of a corpus."""
    home = data_home()
    corpus = resolve_corpus(corpus, home)
    loaded = resolve_tokenizer(tokenizer, home)
    options = CorpusOptions(
        corpus=tuple(corpus.paths),
        name=name,
        column=corpus.column,
        glob=corpus.patterns,
        strict=corpus.strict,
        allow_truncated=corpus.allow_truncated,
        rehash=corpus.rehash,
    ).settled()
    return tokenize(ledger, options, loaded, corpus.model_dump(mode="json"), cluster)


def tokenize(
    ledger: Ledger,
    options: CorpusOptions,
    tokenizer: TextTokenizer,
    parameters: dict[str, Any],
    cluster: str | None = None,
) -> Tokens:
    """Find or make the token shards of what `options` name."""
    path = store_path(data_home(), TOKENS, options.name, **corpus_plan(options, tokenizer))

    def make(_build_id: int, logs: StepLogs) -> None:
        with open_pool(cluster) as pool:
            build_tokens(options, tokenizer, path, pool=pool, on_progress=logs.rest().tokenized)

    built = ledger.build(Request(TOKENS, options.name, path, parameters), make)
    return Tokens(built, options, tokenizer, parameters)


def make_rest(
    ledger: Ledger, tokens: Tokens, segment_tokens: int, workers: int | None, cluster: str | None = None
) -> Built:
    """Find or build the REST store of a corpus."""
    options = RestOptions(**vars(tokens.options), segment_tokens=segment_tokens)
    plan = corpus_plan(options, tokens.tokenizer)
    path = store_path(data_home(), REST, options.name, **plan, segment_tokens=segment_tokens)

    def make(_build_id: int, logs: StepLogs) -> None:
        with open_pool(cluster) as pool:
            build_rest(
                options, tokens.tokenizer, path,
                tokens=tokens.built.path, workers=workers, pool=pool, progress=logs.rest(),
            )  # fmt: skip

    parameters = {**tokens.parameters, "segment_tokens": segment_tokens}
    return ledger.build(Request(REST, options.name, path, parameters, tokens.built.build_id), make)


def use_rest(ledger: Ledger, path: Path) -> Built:
    """Register a finished REST store, unless it is registered."""
    path = path.resolve()
    manifest = load_manifest(path, REST)
    request = Request(REST, manifest.name, path, manifest.parameters)
    return ledger.build(request, lambda _build_id, _logs: None)


def make_counts(
    ledger: Ledger, name: str, rest: Built, max_n: int, head: int, cluster: str | None = None
) -> Built:
    """Find or make the n-gram counts of a REST store, in files and in the database."""
    source = manifest_digest(rest.path)
    path = store_path(data_home(), NGRAMS, name, source=source, max_n=max_n, head=head)

    def make(build_id: int, logs: StepLogs) -> None:
        counted_rows = logs.step("counting", "tokens").amount
        with open_pool(cluster) as pool:
            build_counts(rest.path, path, name=name, max_n=max_n, pool=pool, progress=counted_rows)
        load_statistics(build_id, path, head=head, progress=logs.step("loading", "n-grams").amount)

    request = Request(NGRAMS, name, path, {"max_n": max_n, "head": head}, rest.build_id)
    return ledger.build(request, make)


def make_crest(ledger: Ledger, options: CrestOptions, rest: Built, workers: int | None) -> Built:
    """Find or build a CREST store, with the n-grams that it keeps in the database."""
    options.check()
    parameters = crest_parameters(options)
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


def crest_parameters(options: CrestOptions) -> dict[str, Any]:
    """Return the options of a CREST store but its name, as JSON values."""
    fields = dataclasses.asdict(options) | {"backends": list(options.backends)}
    return {key: value for key, value in fields.items() if key != "name"}


class Target(NamedTuple):
    """The model that stores are made for: a folder or hub name; without type and device, the defaults."""

    source: str
    dtype: str | None = None
    device: str | None = None


def make_answers(
    logger: Logger, name: str, target: Target, questions: Questions, batch: int
) -> list[Responses]:
    """Decode answers of a model, and copy those in a log; each has its own file, which the next run replaces.

    Answers are decoded again only if model, prompts or settings changed, not when a log grows.
    """
    fields = dict(questions)
    options = ResponseOptions(**fields | {key: tuple(fields[key]) for key in ("prompts", "logs")})
    options.check()
    folder = data_home() / "corpora" / name
    folder.mkdir(parents=True, exist_ok=True)
    log = StepLog(logger, "decoding", "answers")
    made = []
    for file, part in (
        (ANSWERS, dataclasses.replace(options, logs=())),
        (LOGGED, dataclasses.replace(options, prompts=())),
    ):
        if part.prompts or part.logs:
            decode = partial(
                make_responses, part, target.source, folder / file,
                dtype=target.dtype, device=target.device, batch=batch, overwrite=True,
                on_progress=lambda done, total, _tokens: log.amount(done, total),
            )  # fmt: skip
            made.append(when_free(decode, folder / file, logger))
            logger.info("answers in %s: %s", made[-1].path, f"{made[-1].counts['answers']:,}")
    return made


def make_dresd(
    ledger: Ledger,
    options: DresdOptions,
    target: Target,
    tokens: Tokens,
    batch_tokens: int | None,
) -> Built:
    """Find or build the DReSD store of a corpus."""
    options = dataclasses.replace(options, **{**vars(tokens.options), "name": options.name})
    tokenizer, parameters = tokens.tokenizer, dresd_parameters(options, target)
    path = store_path(data_home(), DRESD, options.name, **corpus_plan(options, tokenizer), **parameters)

    def make(_build_id: int, logs: StepLogs) -> None:
        loaded = load_model(target.source, dtype=target.dtype, device=target.device)
        from draftstore.hf.states import ModelStates  # imports torch

        progress = DresdProgress(
            tokenized=logs.step("tokenizing", "tokens").tokenized,
            sampled=logs.step("sampling", "tokens").amount,
            embedded=logs.step("embedding", "tokens").amount,
            grouped=logs.step("grouping", "entries").amount,
            hashed=logs.step("hashing", "bytes").amount,
        )
        source = ModelStates(loaded, batch_tokens=batch_tokens)
        build_dresd(options, tokenizer, source, path, tokens=tokens.built.path, progress=progress)

    return ledger.build(Request(DRESD, options.name, path, parameters, tokens.built.build_id), make)


def dresd_parameters(options: DresdOptions, target: Target) -> dict[str, Any]:
    """Return the model of a DReSD store, and its options except for name and corpus, as JSON values."""
    return {
        "model": model_name(target.source),
        "identity": weights_fingerprint(target.source),
        "model_dtype": target.dtype,
        **{key: getattr(options, key) for key in ("dims", "dtype", "max_length", "sample")},
    }
