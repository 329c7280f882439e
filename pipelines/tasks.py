"""The Prefect tasks: the steps of `pipelines.steps`, few and coarse, each retried on transient failures."""

from collections.abc import Sequence
from typing import Any

from prefect import task
from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.cache_policies import NO_CACHE

from draftstore.answers.responses import Responses
from pipelines import rebuilding, releasing, steps
from pipelines.ledger import Ledger
from pipelines.replay_reports import refusal_markdown, replays_markdown
from pipelines.reports import Built, answers_markdown, markdown, table_rows
from pipelines.retries import DELAYS, passes_by_itself
from schema.catalogue import RefusedError
from schema.gates import replay_rows


def may_pass(_task: Any, _run: Any, state: Any) -> bool:
    """Return True if a failed task is worth a retry: its error is transient."""
    return isinstance(state.data, BaseException) and passes_by_itself(state.data)


OPTIONS: dict[str, Any] = {
    "retries": len(DELAYS),
    "retry_delay_seconds": list(DELAYS),
    "retry_condition_fn": may_pass,
    "cache_policy": NO_CACHE,
    "persist_result": False,
}


make_tokens = task(name="tokenize", **OPTIONS)(steps.make_tokens)
make_rest = task(name="build REST store", **OPTIONS)(steps.make_rest)
use_rest = task(name="open REST store", **OPTIONS)(steps.use_rest)
make_counts = task(name="count n-grams", **OPTIONS)(steps.make_counts)
make_crest = task(name="build CREST store", **OPTIONS)(steps.make_crest)
survey = task(name="scan collection", **OPTIONS)(rebuilding.survey)
renew_rest = task(name="renew REST store", **OPTIONS)(rebuilding.renew_rest)
gather_tokens = task(name="tokenize collection", **OPTIONS)(rebuilding.gather_tokens)
make_answers = task(name="answer prompts", **OPTIONS)(steps.make_answers)
make_dresd = task(name="build DReSD store", **OPTIONS)(steps.make_dresd)


prune = task(name="remove old builds", **OPTIONS)(releasing.prune)


@task(name="publish", **OPTIONS)
def publish(ledger: Ledger, release: str, built: Built, force: Sequence[str]) -> list[str]:
    """Point a release at a build, see `releasing.publish`; the page of the run shows replays, and a refusal."""
    key = _key("release", release)
    try:
        moved = releasing.move(ledger, release, built, force)
    except RefusedError as error:
        rows = replay_rows(error.new, error.live)
        create_markdown_artifact(
            refusal_markdown(release, built, error.refusals, rows),
            key=key,
            description=f"release `{release}`: why it did not move",
        )
        raise
    sentences = moved.verdict.sentences()
    if rows := replay_rows(moved.build, moved.live):
        create_markdown_artifact(
            replays_markdown(release, built, rows, sentences),
            key=key,
            description=f"release `{release}`: what its recordings say",
        )
    return sentences


@task(name="report", **{**OPTIONS, "retries": 0})
def report(name: str, builds: Sequence[Built], release: str | None, said: Sequence[str]) -> None:
    """Show the figures of a run on its page."""
    kind = builds[-1].manifest.kind
    key = _key(kind, name)
    create_markdown_artifact(
        markdown(name, builds, release, said), key=key, description=f"{kind} `{name}`: the latest build"
    )
    create_table_artifact(
        table_rows(builds), key=f"{key}-stores", description=f"{kind} `{name}`: the stores of the latest run"
    )


@task(name="report answers", **{**OPTIONS, "retries": 0})
def report_answers(name: str, model: str, answers: Sequence[Responses]) -> None:
    """Show a model's answers on the page of a run."""
    create_markdown_artifact(
        answers_markdown(name, model, answers),
        key=_key("answers", name),
        description=f"answers `{name}`: the latest run",
    )


def _key(kind: str, name: str) -> str:
    """Return the key of an artifact: lower-case letters, digits and dashes."""
    return f"{kind}-{name}".lower().replace(".", "-").replace("_", "-").strip("-")
