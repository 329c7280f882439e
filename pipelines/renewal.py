"""The flow `rebuild`: stores of collections that keep up with their sources.

    collection -> scan -> what is new -> token ids -> REST store, from the one before -> checks -> release NAME
                                                   -> n-gram counts, CREST store      -> checks -> release NAME-crest
                       -> all token ids, hidden states -> DReSD store                 -> checks -> release NAME-dense

It costs what changed, and does nothing where nothing did. It may be killed at any moment and run again. A collection
that fails does not keep the others from it; the run fails with the first error, once all have had their turn.
"""

from collections.abc import Callable, Sequence
from typing import Any

from prefect import flow, get_run_logger

from draftstore.errors import DraftstoreError
from draftstore.stores.crest.build import CrestOptions
from draftstore.stores.crest.store import KIND as CREST
from draftstore.stores.dresd.build import DresdOptions
from draftstore.stores.dresd.store import KIND as DRESD
from draftstore.stores.rest.build import SEGMENT_TOKENS
from pipelines import tasks
from pipelines.ledger import Ledger
from pipelines.parameters import (
    DEFAULT_DISTILLING,
    Dense,
    Distilling,
    Force,
    Keep,
    Name,
    SegmentTokens,
    Workers,
)
from pipelines.rebuilding import Change, LaggingStore, Survey, is_due
from pipelines.reports import Built
from pipelines.steps import Target, crest_parameters, dresd_parameters
from schema.collecting import TREES, VECTORS, list_collections
from schema.releases import is_rolled_back


@flow(name="rebuild")
def rebuild(
    collections: list[Name] = [],  # noqa: B006 - never changed; the page shows it
    distilling: Distilling | None = DEFAULT_DISTILLING,
    dense: Dense | None = None,
    segment_tokens: SegmentTokens = SEGMENT_TOKENS,
    workers: Workers | None = None,
    force: Force = [],  # noqa: B006 - never changed; the page shows it
    keep: Keep | None = None,
) -> list[dict[str, Any]]:
    """Bring the stores of collections up to date with their sources, and publish what passes the checks.

    Args:
        collections: Names of collections (`draftstore corpus list`). None: all.
        distilling: The CREST store that is cut from each REST store, published as NAME-crest. None: no such store.
        dense: The DReSD store of the same documents, published as NAME-dense. None: no such store.
        segment_tokens: Most tokens of one suffix array; sorting takes nine bytes of memory for each.
        workers: Most processes and threads. None: one for each core.
        force: Checks to override where a store is too different from the live one.
        keep: How many builds of each kind and name stay; older ones go unless something needs them. None: all.
    """
    results: list[dict[str, Any]] = []
    failures: list[Exception] = []
    with Ledger(get_run_logger()) as ledger:
        names = collections or _all_names(ledger)
        for name in names:
            try:
                results.append(_rebuild(ledger, name, distilling, dense, segment_tokens, workers, force))
            except (DraftstoreError, OSError) as error:  # the others renew themselves all the same
                ledger.logger.error("collection %s: %s", name, error)  # noqa: TRY400 - a sentence for people
                failures.append(error)
        if names and keep is not None:
            tasks.prune(ledger, keep)
        if failures:
            raise failures[0]
    if not results:
        get_run_logger().warning("there are no collections: make one by `draftstore corpus add NAME PATH`")
    return results


def _all_names(ledger: Ledger) -> list[str]:
    """Return the names of all collections."""
    with ledger.session() as session:
        return [collection.name for collection in list_collections(session)]


def _rebuild(
    ledger: Ledger,
    name: str,
    distilling: Distilling | None,
    dense: Dense | None,
    segment_tokens: int,
    workers: int | None,
    force: Sequence[str],
) -> dict[str, Any]:
    """Bring the stores of one collection up to date; return what was done."""
    surveyed = tasks.survey(ledger, name, segment_tokens, None if dense is None else dense.model)
    rest, change = tasks.renew_rest(ledger, surveyed, workers)
    summary = _summary(ledger, name, rest, change)
    notes = _publish(ledger, name, rest, force)
    tasks.report(name, [rest], name, [summary, *notes])
    result = {"collection": name, **change.counts(), "unchanged": rest.reused, "rest": rest.summary()}
    if distilling is not None:
        result["crest"] = _distil(ledger, surveyed, rest, distilling, workers, force)
    if dense is not None:
        result["dense"] = _embed(ledger, surveyed, dense, force)
    return result


def _publish(ledger: Ledger, release: str, built: Built, force: Sequence[str]) -> list[str]:
    """Move a release to a build, unless it was rolled back from that one; return sentences for the page."""
    with ledger.session() as session:
        rolled_back = is_rolled_back(session, release, built.build_id)
    if not rolled_back:
        return tasks.publish(ledger, release, built, force)
    note = (
        f"release {release} was rolled back from build {built.build_id} and stays until the sources change: "
        f"`draftstore releases publish {release} {built.build_id}` moves it"
    )
    ledger.logger.warning("%s", note)
    return [note]


def _summary(ledger: Ledger, name: str, rest: Built, change: Change) -> str:
    """Log and return what has changed."""
    summary = (
        f"nothing new in {name}: build {rest.build_id} stays"
        if rest.reused
        else f"{len(change.added):,} documents added, {change.removed:,} removed, {change.kept:,} kept"
    )
    ledger.logger.info("collection %s: %s", name, summary)
    return summary


def _distil(
    ledger: Ledger,
    surveyed: Survey,
    rest: Built,
    distilling: Distilling,
    workers: int | None,
    force: Sequence[str],
) -> dict[str, Any] | None:
    """Cut the trees again, if enough has changed; return the summary of the store, None if it stays."""
    name = surveyed.contents.name + TREES
    options = CrestOptions(
        name=name,
        max_n=distilling.max_n,
        ngrams=distilling.ngrams,
        max_bytes=distilling.max_bytes,
        backends=tuple(sorted(set(distilling.backends))),
    )

    def make() -> list[Built]:
        counts = tasks.make_counts(ledger, surveyed.contents.name, rest, distilling.max_n, distilling.head)
        return [rest, counts, tasks.make_crest(ledger, options, rest, workers)]

    store = LaggingStore(name, CREST, crest_parameters(options), distilling.after)
    return _keep_up(ledger, surveyed, store, make, force)


def _embed(ledger: Ledger, surveyed: Survey, dense: Dense, force: Sequence[str]) -> dict[str, Any] | None:
    """Have the model read all documents again, if enough has changed; return as `_distil`."""
    name = surveyed.contents.name + VECTORS
    target = Target(dense.model, dense.model_dtype, dense.device)
    options = DresdOptions(
        (), name, dims=dense.dims, dtype=dense.dtype, max_length=dense.max_length, sample=dense.sample
    )

    def make() -> list[Built]:
        tokens = tasks.gather_tokens(ledger, surveyed)
        return [tokens.built, tasks.make_dresd(ledger, options, target, tokens, dense.batch_tokens)]

    store = LaggingStore(name, DRESD, dresd_parameters(options, target), dense.after)
    return _keep_up(ledger, surveyed, store, make, force)


def _keep_up(
    ledger: Ledger,
    surveyed: Survey,
    store: LaggingStore,
    make: Callable[[], list[Built]],
    force: Sequence[str],
) -> dict[str, Any] | None:
    """Make, publish and report a store if it is due; return its summary, None if it stays."""
    if not is_due(ledger, surveyed, store):
        ledger.logger.info("%s: less than %.0f %% is new since it was made", store.release, 100 * store.after)
        return None
    builds = make()
    notes = _publish(ledger, store.release, builds[-1], force)
    tasks.report(store.release, builds, store.release, notes)
    return builds[-1].summary()
