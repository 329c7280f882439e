"""The Prefect tasks: the steps of `pipelines.steps`, few and coarse, each retried on transient failures."""

from collections.abc import Sequence
from typing import Any

from prefect import task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE

from draftstore.answers.responses import Responses
from pipelines import rebuilding, releasing, steps
from pipelines.ledger import Ledger
from pipelines.reports import (
    Built,
    answers_markdown,
    markdown,
    refusal_markdown,
    replay_notes,
)
from pipelines.retries import DELAYS, is_transient
from schema.catalogue import RefusedError
from schema.gates import replay_rows


def worth_a_retry(_task: Any, _run: Any, state: Any) -> bool:
    """Return True if the error of a failed task is transient."""
    return isinstance(state.data, BaseException) and is_transient(state.data)


OPTIONS: dict[str, Any] = {
    "retries": len(DELAYS),
    "retry_delay_seconds": list(DELAYS),
    "retry_condition_fn": worth_a_retry,
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
    """Point a release at a build; return sentences for the page of the run, which also shows a refusal."""
    try:
        moved = releasing.publish(ledger, release, built, force)
    except RefusedError as error:
        notes = replay_notes(replay_rows(error.new, error.live))
        create_markdown_artifact(
            refusal_markdown(release, built, error.refusals, notes),
            key=_key("release", release),
            description=f"release `{release}`: why it did not move",
        )
        raise
    return moved.verdict.sentences() + replay_notes(replay_rows(moved.build, moved.live))


@task(name="report", **{**OPTIONS, "retries": 0})
def report(name: str, builds: Sequence[Built], release: str | None, notes: Sequence[str]) -> None:
    """Show the figures of a run on its page."""
    kind = builds[-1].manifest.kind
    create_markdown_artifact(
        markdown(name, builds, release, notes),
        key=_key(kind, name),
        description=f"{kind} `{name}`: the latest build",
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
