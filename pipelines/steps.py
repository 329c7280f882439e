"""The Prefect tasks of the flows: steps of `schema.renewal`, few and coarse, each retried on transient failures.

Transient are interrupted I/O and a database that is down. Bad input, wrong parameters, a full disk or missing
permissions are permanent.
"""

from collections.abc import Callable
from errno import EAGAIN, EBUSY, EHOSTUNREACH, EIO, ENETDOWN, ENETUNREACH, ESTALE
from functools import partial
from typing import Any, ParamSpec, TypeVar

from prefect import Task, task
from prefect.cache_policies import NO_CACHE

from draftstore.answers.responses import Responder, ResponseOptions, Responses, make_responses
from draftstore.text.tokenizing import CorpusOptions
from pipelines.parameters import CorpusFiles
from schema.db.embedded import data_home
from schema.db.errors import DatabaseAwayError, DatabaseTimeoutError, translate
from schema.renewal import making, publishing, stores, survey
from schema.renewal.ledger import Ledger, Logger, StepLog, when_free
from schema.renewal.making import Tokens, resolve_tokenizer, write_demonstration

TRANSIENT = DatabaseAwayError, DatabaseTimeoutError, ConnectionError, TimeoutError
CODES = EAGAIN, EBUSY, EHOSTUNREACH, EIO, ENETDOWN, ENETUNREACH, ESTALE
DELAYS = (2.0, 10.0, 30.0, 60.0)
"""Seconds before each new attempt: together longer than a database takes to restart."""
P = ParamSpec("P")
R = TypeVar("R")


def is_transient(error: BaseException | None) -> bool:
    """Return True if the step may succeed on a retry, judging by the error or its causes."""
    if error is None:
        return False
    if isinstance(translate(error) or error, TRANSIENT) or getattr(error, "errno", None) in CODES:
        return True
    return is_transient(error.__cause__ or (None if error.__suppress_context__ else error.__context__))


def worth_a_retry(_task: Any, _run: Any, state: Any) -> bool:
    """Return True if the error of a failed task is transient."""
    return isinstance(state.data, BaseException) and is_transient(state.data)


def step(name: str, **options: Any) -> Callable[[Callable[P, R]], Task[P, R]]:
    """Make a task of a step."""

    def decorate(function: Callable[P, R]) -> Task[P, R]:
        return task(
            name=name, retries=len(DELAYS), retry_delay_seconds=list(DELAYS), retry_condition_fn=worth_a_retry,
            cache_policy=NO_CACHE, persist_result=False, **options,
        )(function)  # fmt: skip

    return decorate


@step("tokenize")
def make_tokens(ledger: Ledger, name: str, corpus: CorpusFiles, tokenizer: str | None) -> Tokens:
    """Find or make the token shards of a corpus, by default of the demonstration corpus."""
    home = data_home()
    if not corpus.paths:
        corpus = corpus.changed(paths=[write_demonstration(home)])
    texts = CorpusOptions.of(corpus, corpus=tuple(corpus.paths)).texts()
    return making.make_tokens(
        ledger, name, texts, resolve_tokenizer(tokenizer, home), corpus.model_dump(mode="json")
    )


@step("answer prompts")
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


make_store = step("build store", task_run_name="build {kind} store")(making.make_store)
make_counts = step("count n-grams")(making.make_counts)
use_rest = step("open REST store")(making.use_rest)
join_rest = step("join REST stores")(making.join_rest)
take_survey = step("scan collection")(survey.survey)
renew_rest = step("renew REST store")(stores.renew_rest)
put_to_rest = step("put live logs to rest")(publishing.put_to_rest)
make_lagging = step("build lagging store", task_run_name="build {store.kind} store")(stores.make_lagging)
publish = step("publish")(publishing.publish)
prune = step("remove old builds")(publishing.prune)
