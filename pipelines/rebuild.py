"""The flow `rebuild`: stores of collections that keep up with their sources.

    collection -> scan -> what is new -> token ids -> REST store, from the last one   -> checks -> release NAME
                                                   -> n-gram counts, CREST store      -> checks -> release NAME-crest
                       -> all token ids, hidden states -> DReSD store                 -> checks -> release NAME-dense

Its cost depends on what changed; if nothing did, it does nothing. It may be killed at any moment and run again. If a
collection fails, the others are still processed; the run then fails with the first error.
"""

from collections.abc import Sequence
from typing import Any

from prefect import get_run_logger
from pydantic import Field

from draftstore.errors import DraftstoreError
from draftstore.stores.crest.build import CrestOptions, Share, TreeOptions
from draftstore.stores.crest.store import KIND as CREST
from draftstore.stores.dresd.build import DresdOptions, VectorOptions
from draftstore.stores.dresd.store import KIND as DRESD
from draftstore.stores.kind import ModelSources, Workers
from draftstore.stores.rest.build import Segments
from pipelines import steps
from pipelines.parameters import ReleaseChecks, StoredNgrams, flow_of
from schema.collections.collecting import TREES, VECTORS, releases_of
from schema.collections.live_logs import live_logs
from schema.renewal.ledger import Built, Ledger
from schema.renewal.publishing import require_renewed, stays_rolled_back
from schema.renewal.stores import LaggingStore, is_due
from schema.renewal.survey import collection_names


class CrestRebuild(TreeOptions, StoredNgrams):
    """The CREST store that is cut from a collection's REST store, and when it is cut."""

    share: Share = 0.2
    after: float = Field(
        0.05,
        ge=0,
        le=1,
        description="Trees are cut again once this share of the documents is new, and when documents were removed. "
        "0: at every change.",
    )


class DenseRebuild(VectorOptions, ModelSources):
    """The DReSD store of a collection's documents, and when it is rebuilt; both have the model's tokenizer."""

    after: float = Field(
        0.2,
        ge=0,
        le=1,
        description="The model reads all documents again once this share of them is new, and when documents were "
        "removed. 0: at every change.",
    )


class RebuildOptions(Segments, Workers):
    """Which stores are brought up to date."""

    collections: list[str] = Field(
        [], description="Names of collections (`draftstore corpus list`). None: all."
    )
    distilling: CrestRebuild | None = Field(
        CrestRebuild(),
        description="The CREST store that is cut from each REST store, published as NAME-crest. None: no such store.",
    )
    dense: DenseRebuild | None = Field(
        None,
        description="The DReSD store of the same documents, published as NAME-dense. None: no such store.",
    )

    def lagging(self, name: str) -> dict[str, LaggingStore]:
        """Return the stores beside a collection's REST store, by their names in the result."""
        stores: dict[str, LaggingStore] = {}
        if trees := self.distilling:
            options, workers = CrestOptions.of(trees, name=name + TREES), Workers(workers=self.workers)
            stores["crest"] = LaggingStore(CREST, options, workers, trees.after, trees.head)
        if vectors := self.dense:
            dense = DresdOptions.of(vectors, name=name + VECTORS, corpus=())
            stores["dense"] = LaggingStore(DRESD, dense, ModelSources.of(vectors), vectors.after)
        return stores


@flow_of("rebuild", RebuildOptions, ReleaseChecks)
def rebuild(*, force: Sequence[str] = (), keep: int | None = None, **parameters: Any) -> list[dict[str, Any]]:
    """Bring the stores of collections up to date with their sources and publish those that pass the checks."""
    renewing = RebuildOptions(**parameters)
    results: list[dict[str, Any]] = []
    failures: list[Exception] = []
    with Ledger(get_run_logger()) as ledger:
        names = renewing.collections or collection_names(ledger)
        for name in names:
            try:
                results.append(renew(ledger, name, renewing, force))
            except (DraftstoreError, OSError) as error:  # the others are still renewed
                ledger.logger.error("collection %s: %s", name, error)  # noqa: TRY400 - a sentence for the user
                failures.append(error)
        if names and keep is not None:
            steps.prune(ledger, keep)
        if failures:
            raise failures[0]
    if not results:
        get_run_logger().warning("there are no collections: `draftstore corpus add NAME PATH` creates one")
    return results


def renew(ledger: Ledger, name: str, renewing: RebuildOptions, force: Sequence[str]) -> dict[str, Any]:
    """Bring the stores of one collection up to date; return what was done."""
    # 1. Scan the sources: files that did not change are not read again. Rules and removals say what is wanted.
    surveyed = steps.take_survey(
        ledger, name, renewing.segment_tokens, renewing.dense.model if renewing.dense else None
    )

    # 2. Make the REST store from the last one: drop what is no longer wanted, tokenize and sort what is new. What a
    #    store holds names its folder, so that a store of the same documents is found and a killed build resumes.
    rest, change = steps.renew_rest(ledger, surveyed, renewing.workers)
    said = f"nothing new: build {rest.build_id} stays" if rest.reused else str(change)
    ledger.logger.info("collection %s: %s", name, said)
    result = {"collection": name, **change.counts(), "unchanged": rest.reused, "rest": rest.summary()}

    # 3. Verify and compare it with the live one, and move the release, unless someone rolled back from this build.
    _publish(ledger, name, rest, force)

    # 4. What the release holds now leaves the live memory, and what was removed leaves its logs.
    if live_logs(surveyed.collection):
        result["live"] = steps.put_to_rest(ledger, surveyed)
        numbers = result["live"].values()
        ledger.logger.info("collection %s: %d segments of live logs put to rest, %d deleted", name, *numbers)

    # 5. The stores that lag behind, the same way, if enough has changed.
    for key, store in renewing.lagging(name).items():
        result[key] = None
        if is_due(ledger, surveyed, store):
            built = steps.make_lagging(ledger, surveyed, rest, store)
            _publish(ledger, store.options.name, built, force)
            result[key] = built.summary()

    # 6. Fail if a release still holds removed documents.
    require_renewed(ledger, releases_of(name), force)
    return result


def _publish(ledger: Ledger, release: str, built: Built, force: Sequence[str]) -> None:
    if not stays_rolled_back(ledger, release, built):
        steps.publish(ledger, release, built, force)
