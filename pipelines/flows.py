"""The Prefect flows: parameters in, a few tasks, a summary out; one for each kind of store that has a builder.

Every flow may be killed at any moment and run again with the same parameters: it resumes. A release moves last, in one
transaction, to a verified store.
"""

from collections.abc import Sequence
from typing import Any

from prefect import Flow, get_run_logger

from draftstore.answers.responses import Responder
from draftstore.errors import BuildError
from draftstore.options import Options
from draftstore.stores.crest.counts import CountOptions
from draftstore.stores.kind import Builder, ModelSources, Workers
from draftstore.stores.registry import builder_of
from draftstore.stores.rest.build import RestOptions, RestSources
from draftstore.stores.rest.store import KIND as REST
from draftstore.text.tokenizing import CorpusOptions
from pipelines import steps
from pipelines.parameters import (
    AnswersInput,
    BuildInput,
    CorpusFiles,
    ModelAnswers,
    Publishing,
    StoredNgrams,
    Tokenization,
    flow_of,
)
from schema.renewal.ledger import Built, Ledger
from schema.renewal.making import DEMO, Tokens
from schema.renewal.publishing import require_free, require_kind


@flow_of("tokenize-corpus", BuildInput, Tokenization)
def tokenize_corpus(*, name: str | None, corpus: CorpusFiles, **values: Any) -> dict[str, Any]:
    """Write a corpus as token shards."""
    name = resolve_name(name, demo=not corpus.paths)
    with Ledger(get_run_logger()) as ledger:
        return _finish(ledger, name, [_tokens(ledger, name, corpus, values).built])


@flow_of("count-ngrams", BuildInput, Tokenization, RestSources, CountOptions, StoredNgrams)
def count_ngrams(*, name: str | None, corpus: CorpusFiles, **values: Any) -> dict[str, Any]:
    """Count the n-grams of a REST store exactly: all go to Parquet, the most common ones and the spectrum to SQL."""
    name = resolve_name(name, demo=_is_demo(corpus, values))
    with Ledger(get_run_logger()) as ledger:
        builds = _rest(ledger, name, corpus, values)
        return _finish(ledger, name, [*builds, _count(ledger, name, builds[-1], values)])


@flow_of("generate-responses", Responder, AnswersInput)
def generate_responses(**values: Any) -> dict[str, Any]:
    """Record a model's answers as a corpus for its stores.

    The file for a name keeps its path, so that scheduled builds can name it as their corpus: in the data folder,
    `corpora/NAME/answers.jsonl.zst`.
    """
    by, asked = Responder.take(values), AnswersInput.take(values)
    answers = steps.make_answers(get_run_logger(), asked.name, by, asked.questions)
    counts = {key: answers.counts[key] for key in ("answers", "tokens")}
    made = {"name": asked.name, "model": by.model, "path": str(answers.path), "reused": answers.reused}
    return made | counts


def build_flow(kind: str) -> Flow[..., Any]:
    """Return the flow that builds stores of a kind."""
    builder = builder_of(kind)
    assert builder is not None
    models: list[type[Options]] = [BuildInput, builder.sources, builder.options]
    models.insert(1, ModelAnswers if issubclass(builder.sources, ModelSources) else Tokenization)
    models += [StoredNgrams, Publishing] if builder.counted else [Publishing]

    def run(**values: Any) -> dict[str, Any]:
        return _build(kind, builder, **values)

    run.__name__ = run.__qualname__ = f"build_{kind}"
    run.__doc__ = builder.help
    return flow_of(f"build-{kind}", *models)(run)


def _build(
    kind: str, builder: Builder, *, name: str | None, corpus: CorpusFiles, **values: Any
) -> dict[str, Any]:
    publishing = Publishing.take(values)
    with Ledger(get_run_logger()) as ledger:
        demo = _is_demo(corpus, values)
        name = resolve_name(name, demo=demo)
        release = publishing.release and publishing.release.replace("{name}", name)
        publishing = publishing.changed(release=release)
        if demo and release:
            require_free(ledger, release)
        if release and "kind" not in publishing.force:
            require_kind(ledger, release, kind)
        texts = {"corpus": ()} if issubclass(builder.options, CorpusOptions) else {}
        options = builder.options.take(values, name=name, **texts)  # both are checked before hours of work
        by: Workers | ModelSources = Workers.take(values)
        if issubclass(builder.sources, ModelSources):
            by = ModelSources.take(values)
            corpus = _answered(ledger, name, corpus, by, ModelAnswers.take(values))
        source: Tokens | Built
        if issubclass(builder.sources, RestSources):
            builds = _rest(ledger, name, corpus, values)
            source = builds[-1]
            builds += [_count(ledger, name, source, values)] if builder.counted else []
        else:
            source = _tokens(ledger, name, corpus, values)
            builds = [source.built]
        builds.append(steps.make_store(ledger, kind, options, by, source))
        return _finish(ledger, name, builds, publishing)


build_rest, build_crest, build_dresd = build_flow("rest"), build_flow("crest"), build_flow("dresd")
FLOWS = tokenize_corpus, count_ngrams, generate_responses, build_rest, build_crest, build_dresd


def resolve_name(name: str | None, *, demo: bool) -> str:
    """Return the name of a store: the one that is set, else `demo`, but only for the demonstration corpus."""
    if name is None and not demo:
        raise BuildError(
            "a store of your own texts needs a name: --param name=chat, or a collection (`draftstore corpus add chat "
            "PATH`), whose name the flow rebuild uses"
        )
    return name or DEMO


def _is_demo(corpus: CorpusFiles, values: dict[str, Any]) -> bool:
    return not (corpus.paths or values.get("rest") or values.get("questions"))


def _tokens(ledger: Ledger, name: str, corpus: CorpusFiles, values: dict[str, Any]) -> Tokens:
    tokenizer = values.get("tokenizer", values.get("model"))
    return steps.make_tokens(ledger, name, corpus, tokenizer)


def _rest(ledger: Ledger, name: str, corpus: CorpusFiles, values: dict[str, Any]) -> list[Built]:
    """Return the builds of the REST store `rest`, of several and their joined one, or of the corpus's; it is last."""
    if values["rest"]:
        builds = [steps.use_rest(ledger, path) for path in values["rest"]]
        return builds if len(builds) == 1 else [*builds, steps.join_rest(ledger, name, builds)]
    tokens, options = _tokens(ledger, name, corpus, values), RestOptions.take(values, name=name, corpus=())
    return [tokens.built, steps.make_store(ledger, REST, options, Workers.take(values), tokens)]


def _count(ledger: Ledger, name: str, rest: Built, values: dict[str, Any]) -> Built:
    return steps.make_counts(ledger, name, rest, values["max_n"], values["head"])


def _answered(
    ledger: Ledger, name: str, corpus: CorpusFiles, by: ModelSources, asked: ModelAnswers
) -> CorpusFiles:
    if asked.questions is None:
        return corpus
    responder = Responder(model=by.model, dtype=by.model_dtype, device=by.device, batch=asked.batch)
    answers = steps.make_answers(ledger.logger, name, responder, asked.questions)
    return corpus.changed(paths=[*corpus.paths, answers.path])


def _finish(
    ledger: Ledger,
    name: str,
    builds: Sequence[Built],
    publishing: Publishing = Publishing(),  # noqa: B008 (immutable)
) -> dict[str, Any]:
    release = publishing.release
    if release is not None:
        steps.publish(ledger, release, builds[-1], publishing.force)
    if publishing.keep is not None:
        steps.prune(ledger, publishing.keep)
    return {"name": name, "release": release, **builds[-1].summary()}
