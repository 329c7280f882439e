"""The Prefect tasks: the steps of `pipelines.steps`, few and coarse, each retried on transient failures."""

from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from pipelines import rebuilding, releasing, steps
from pipelines.retries import DELAYS, is_transient


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
make_store = task(name="build store", task_run_name="build {kind} store", **OPTIONS)(steps.make_store)
use_rest = task(name="open REST store", **OPTIONS)(steps.use_rest)
make_counts = task(name="count n-grams", **OPTIONS)(steps.make_counts)
survey = task(name="scan collection", **OPTIONS)(rebuilding.survey)
renew_rest = task(name="renew REST store", **OPTIONS)(rebuilding.renew_rest)
put_to_rest = task(name="put live logs to rest", **OPTIONS)(rebuilding.put_to_rest)
gather_tokens = task(name="tokenize collection", **OPTIONS)(rebuilding.gather_tokens)
make_answers = task(name="answer prompts", **OPTIONS)(steps.make_answers)
prune = task(name="remove old builds", **OPTIONS)(releasing.prune)
publish = task(name="publish", **OPTIONS)(releasing.publish)
