"""The tasks: shells over `pipelines.steps`, few and coarse, each tried again where trying again can help."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prefect import get_run_logger, task
from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.cache_policies import NO_CACHE

from draftstore.answers.responses import Responses
from draftstore.stores.crest.build import CrestOptions
from draftstore.stores.dresd.build import DresdOptions
from pipelines import steps
from pipelines.ledger import Ledger
from pipelines.parameters import Corpus, Questions
from pipelines.reports import Built, answers_markdown, markdown, table_rows
from pipelines.retries import DELAYS, passes_by_itself
from pipelines.steps import Target


def may_pass(_task: Any, _run: Any, state: Any) -> bool:
    """Tell whether a failed task is worth another try: its error passes by itself."""
    return isinstance(state.data, BaseException) and passes_by_itself(state.data)


OPTIONS: dict[str, Any] = {
    "retries": len(DELAYS),
    "retry_delay_seconds": list(DELAYS),
    "retry_condition_fn": may_pass,
    "cache_policy": NO_CACHE,
    "persist_result": False,
}


@task(name="tokenize", **OPTIONS)
def make_tokens(ledger: Ledger, name: str, corpus: Corpus, tokenizer: str | None) -> Built:
    """Write a corpus as token shards."""
    return steps.make_tokens(ledger, name, corpus, tokenizer)


@task(name="build REST store", **OPTIONS)
def make_rest(
    ledger: Ledger,
    name: str,
    corpus: Corpus,
    tokenizer: str | None,
    tokens: Built,
    segment_tokens: int,
    workers: int | None,
) -> Built:
    """Build the REST store of a corpus."""
    return steps.make_rest(ledger, name, corpus, tokenizer, tokens, segment_tokens, workers)


@task(name="open REST store", **OPTIONS)
def use_rest(ledger: Ledger, path: Path) -> Built:
    """Take a finished REST store."""
    return steps.use_rest(ledger, path)


@task(name="count n-grams", **OPTIONS)
def make_counts(ledger: Ledger, name: str, rest: Built, max_n: int, head: int) -> Built:
    """Count the n-grams of a REST store, and load what people ask for into the database."""
    return steps.make_counts(ledger, name, rest, max_n, head)


@task(name="build CREST store", **OPTIONS)
def make_crest(ledger: Ledger, options: CrestOptions, rest: Built, workers: int | None) -> Built:
    """Build a CREST store from a REST store, with its tables in the database."""
    return steps.make_crest(ledger, options, rest, workers)


@task(name="answer prompts", **OPTIONS)
def make_answers(name: str, target: Target, questions: Questions, batch: int) -> list[Responses]:
    """Have a model answer, and take over what a log holds."""
    return steps.make_answers(get_run_logger(), name, target, questions, batch)


@task(name="build DReSD store", **OPTIONS)
def make_dresd(
    ledger: Ledger,
    options: DresdOptions,
    corpus: Corpus,
    target: Target,
    tokens: Built,
    batch_tokens: int | None,
) -> Built:
    """Build the DReSD store of a corpus, from its shards and the hidden states of a model."""
    return steps.make_dresd(ledger, options, corpus, target, tokens, batch_tokens)


@task(name="publish", **OPTIONS)
def publish(ledger: Ledger, release: str, built: Built) -> None:
    """Have a release point at a build."""
    steps.publish(ledger, release, built)


@task(name="report", **{**OPTIONS, "retries": 0})
def report(name: str, builds: Sequence[Built], release: str | None) -> None:
    """Show the figures of a run on its page."""
    kind = builds[-1].manifest.kind
    key = _key(kind, name)
    create_markdown_artifact(
        markdown(name, builds, release), key=key, description=f"{kind} `{name}`: the latest build"
    )
    create_table_artifact(
        table_rows(builds), key=f"{key}-stores", description=f"{kind} `{name}`: the stores of the latest run"
    )


@task(name="report answers", **{**OPTIONS, "retries": 0})
def report_answers(name: str, model: str, answers: Sequence[Responses]) -> None:
    """Show what a model answered on the page of a run."""
    create_markdown_artifact(
        answers_markdown(name, model, answers),
        key=_key("answers", name),
        description=f"answers `{name}`: the latest run",
    )


def _key(kind: str, name: str) -> str:
    """Return what the page calls something: it takes lower case letters, digits and dashes."""
    return f"{kind}-{name}".lower().replace(".", "-").replace("_", "-").strip("-")
