"""The flow `rebuild`: stores of collections that keep up with their sources.

    collection -> scan -> what is new -> token ids -> REST store, from the last one   -> checks -> release NAME
                                                   -> n-gram counts, CREST store      -> checks -> release NAME-crest
                       -> all token ids, hidden states -> DReSD store                 -> checks -> release NAME-dense

Its cost depends on what changed; if nothing did, it does nothing. It may be killed at any moment and run again. If a
collection fails, the others are still processed; the run then fails with the first error.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from prefect import get_run_logger
from pydantic import Field

from draftstore.errors import DraftstoreError
from draftstore.stores.building import ModelSources, Workers
from draftstore.stores.crest.build import CrestOptions, Share, TreeOptions
from draftstore.stores.crest.store import KIND as CREST
from draftstore.stores.dresd.build import DresdOptions, VectorOptions
from draftstore.stores.dresd.store import KIND as DRESD
from draftstore.stores.rest.build import Segments
from pipelines import tasks
from pipelines.ledger import Built, Ledger
from pipelines.parameters import Checks, Head, Name, flow_of
from pipelines.rebuilding import LaggingStore, Survey, is_due
from pipelines.releasing import holds_removed, require_renewed
from pipelines.steps import parameters_of
from schema.catalogue.releases import is_rolled_back
from schema.collections.collecting import TREES, VECTORS, list_collections, releases_of
from schema.collections.live_logs import live_logs


class Distilling(TreeOptions, Head):
    """The CREST store that is cut from a collection's REST store, and when it is cut."""

    share: Share = 0.2
    after: float = Field(
        0.05,
        ge=0,
        le=1,
        description="Trees are cut again once this share of the documents is new, and when documents were removed. "
        "0: at every change.",
    )


class Dense(VectorOptions, ModelSources):
    """The DReSD store of a collection's documents, and when it is rebuilt; both have the model's tokenizer."""

    after: float = Field(
        0.2,
        ge=0,
        le=1,
        description="The model reads all documents again once this share of them is new, and when documents were "
        "removed. 0: at every change.",
    )


class Renewing(Segments, Workers):
    """Which stores are brought up to date."""

    collections: list[Name] = Field(
        [], description="Names of collections (`draftstore corpus list`). None: all."
    )
    distilling: Distilling | None = Field(
        Distilling(),
        description="The CREST store that is cut from each REST store, published as NAME-crest. None: no such store.",
    )
    dense: Dense | None = Field(
        None,
        description="The DReSD store of the same documents, published as NAME-dense. None: no such store.",
    )


@flow_of("rebuild", Renewing, Checks)
def rebuild(*, force: Sequence[str] = (), keep: int | None = None, **given: Any) -> list[dict[str, Any]]:
    """Bring the stores of collections up to date with their sources and publish those that pass the checks."""
    renewing = Renewing(**given)
    results: list[dict[str, Any]] = []
    failures: list[Exception] = []
    with Ledger(get_run_logger()) as ledger:
        names = renewing.collections or _all_names(ledger)
        for name in names:
            try:
                results.append(_rebuild(ledger, name, renewing, force))
            except (DraftstoreError, OSError) as error:  # the others are still renewed
                ledger.logger.error("collection %s: %s", name, error)  # noqa: TRY400 - a sentence for the user
                failures.append(error)
        if names and keep is not None:
            tasks.prune(ledger, keep)
        if failures:
            raise failures[0]
    if not results:
        get_run_logger().warning("there are no collections: `draftstore corpus add NAME PATH` creates one")
    return results


def _all_names(ledger: Ledger) -> list[str]:
    """Return the names of all collections."""
    with ledger.session() as session:
        return [collection.name for collection in list_collections(session)]


def _rebuild(ledger: Ledger, name: str, renewing: Renewing, force: Sequence[str]) -> dict[str, Any]:
    """Bring the stores of one collection up to date; return what was done."""
    dense, log = renewing.dense, ledger.logger.info
    surveyed = tasks.survey(ledger, name, renewing.segment_tokens, None if dense is None else dense.model)
    rest, change = tasks.renew_rest(ledger, surveyed, renewing.workers)
    log(
        "collection %s: %s", name, f"nothing new: build {rest.build_id} stays" if rest.reused else str(change)
    )
    _publish(ledger, name, rest, force)
    result = {"collection": name, **change.counts(), "unchanged": rest.reused, "rest": rest.summary()}
    if live_logs(surveyed.collection):
        result["live"] = tasks.put_to_rest(ledger, surveyed)
        log("collection %s: %d segments of live logs put to rest, %d deleted", name, *result["live"].values())
    for key, store, make in _lagging(ledger, surveyed, rest, renewing):
        result[key] = None
        if is_due(ledger, surveyed, store):
            built = make()
            _publish(ledger, store.release, built, force)
            result[key] = built.summary()
        else:
            log(
                "%s: less than %.0f %% of documents are new since its build", store.release, 100 * store.after
            )
    require_renewed(ledger, releases_of(name), force)
    return result


def _publish(ledger: Ledger, release: str, built: Built, force: Sequence[str]) -> None:
    """Move a release to a build, unless it was rolled back from that one to one without removed documents."""
    with ledger.session() as session:
        rolled_back = is_rolled_back(session, release, built.build_id)
    if not rolled_back or holds_removed(ledger, release):
        tasks.publish(ledger, release, built, force)
        return
    ledger.logger.warning(
        "release %s was rolled back from build %d and stays until the sources change: "
        "`draftstore releases publish %s %d` moves it", release, built.build_id, release, built.build_id,
    )  # fmt: skip


def _lagging(
    ledger: Ledger, surveyed: Survey, rest: Built, renewing: Renewing
) -> Iterator[tuple[str, LaggingStore, Callable[[], Built]]]:
    """Yield the stores beside the REST store: the name in the result, when it is due, and its builder."""
    name, distilling, dense = surveyed.contents.name, renewing.distilling, renewing.dense
    if distilling is not None:
        trees, workers = CrestOptions.of(distilling, name=name + TREES), Workers(workers=renewing.workers)

        def distil() -> Built:
            tasks.make_counts(ledger, name, rest, distilling.max_n, distilling.head)
            return tasks.make_store(ledger, CREST, trees, workers, rest)

        parameters = parameters_of(trees, workers)
        yield "crest", LaggingStore(trees.name, CREST, parameters, distilling.after), distil
    if dense is not None:
        vectors, model = DresdOptions.of(dense, name=name + VECTORS, corpus=()), ModelSources.of(dense)

        def embed() -> Built:
            tokens = tasks.gather_tokens(ledger, surveyed)
            return tasks.make_store(ledger, DRESD, vectors, model, tokens)

        parameters = parameters_of(vectors, model)
        yield "dense", LaggingStore(vectors.name, DRESD, parameters, dense.after), embed
