"""The stores of a collection.

The REST store is made from the previous one: only new documents are tokenized and sorted. The others lag behind it and
are built again when enough has changed.
"""

import dataclasses
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftstore.errors import BuildRunningError, DraftstoreError
from draftstore.storage.files import locked_directory, remove
from draftstore.storage.manifest import load_manifest, verify_files
from draftstore.stores.crest.build import CrestOptions
from draftstore.stores.dresd.build import DresdOptions
from draftstore.stores.kind import ModelSources
from draftstore.stores.registry import open_store
from draftstore.stores.rest.store import KIND as REST
from draftstore.stores.rest.store import RestStore, read_digests
from draftstore.stores.rest.updating import update_rest
from draftstore.text.digests import digest_keys
from draftstore.text.tokenizing import made_with
from schema.catalogue.builds import list_builds
from schema.catalogue.lineage import store_digests
from schema.collections.removal_files import collection_folder
from schema.db.embedded import data_home
from schema.models import Release
from schema.renewal.ledger import Built, Ledger, Request, StepLogs
from schema.renewal.making import Reader, make_counts, make_store, parameters_of, store_path
from schema.renewal.survey import Survey, tokenize_all, tokenize_some

SHARDS = "shards"
"""Token ids of new documents, in a folder that rebuilds of a collection use one at a time."""


@dataclasses.dataclass(frozen=True)
class Change:
    """What changes from the store `base`, if there is one: documents added, kept and removed."""

    base: Path | None
    added: NDArray[np.uint8]  # [n, 16], their digests
    kept: int
    removed: int

    def counts(self) -> dict[str, Any]:
        """Return the numbers as JSON values."""
        base = None if self.base is None else str(self.base)
        return {"base": base, "added": len(self.added), "kept": self.kept, "removed": self.removed}

    def __str__(self) -> str:
        return f"{len(self.added):,} documents added, {self.removed:,} removed, {self.kept:,} kept"


def renew_rest(ledger: Ledger, surveyed: Survey, workers: int | None) -> tuple[Built, Change]:
    """Find or make the REST store of what a collection holds today, from the newest previous one."""
    contents, tokenizer = surveyed.contents, surveyed.tokenizer
    path = store_path(data_home(), REST, contents.name, plan=contents.plan(tokenizer))
    change = Change(None, contents.digests, 0, 0)
    if base := _newest(ledger, surveyed, path):
        change = change_since(base.path, read_digests(base.path), contents.digests)
    folder = collection_folder(contents.name) / "tokens"

    def make(_build_id: int, logs: StepLogs) -> None:
        with locked_directory(folder):
            added = tokenize_some(surveyed, change.added, folder / SHARDS, logs.step("tokenizing", "tokens"))
            update_rest(
                contents, tokenizer, path,
                base=change.base, added=added, workers=workers, progress=logs.step,
            )  # fmt: skip

    parameters = {"collection": contents.name, "segment_tokens": contents.segment_tokens, **change.counts()}
    built = ledger.build(Request(REST, contents.name, path, parameters), make)
    # This also removes what a killed run left of other documents.
    with suppress(BuildRunningError), locked_directory(folder):
        remove(folder / SHARDS)
    return built, change


def change_since(base: Path, held: NDArray[np.uint8], digests: NDArray[np.uint8]) -> Change:
    """Compare distinct digests, uint8 [n, 16], with those of the documents that a store holds."""
    wanted, known = digest_keys(digests), np.unique(digest_keys(held))
    stays = np.isin(wanted, known)
    kept = int(stays.sum())
    return Change(base, digests[~stays], kept, len(known) - kept)


def _newest(ledger: Ledger, surveyed: Survey, path: Path) -> RestStore | None:
    """Return the newest intact store of a collection with its tokenizer and template, preferably that at `path`."""
    # Every byte of another one is read: damage in it would be copied into all later ones and pass verification there.
    wanted = made_with(surveyed.tokenizer).items()
    with ledger.session() as session:
        builds = list_builds(session, kind=REST, name=surveyed.contents.name, state="finished")
        places = [path, *(Path(build.path) for build in builds)]
    for place in places:
        try:
            manifest = load_manifest(place, REST)
            if wanted <= manifest.parameters["plan"].items():
                store = RestStore.open(place)
                problems = [] if place == path else verify_files(place, manifest)
                if not problems:
                    return store
                ledger.logger.warning("%s: the next store is not made from this one", problems[0])
        except (DraftstoreError, KeyError, OSError):
            continue
    return None


@dataclasses.dataclass(frozen=True)
class LaggingStore:
    """A store beside a collection's REST store, and when it is due."""

    kind: str
    options: CrestOptions | DresdOptions  # with others, it is due at once; its name is its release's
    by: Reader  # of its texts
    after: float  # minimum share of new documents for it to be due
    head: int = 0  # how many n-grams of each n the database gets


def is_due(ledger: Ledger, surveyed: Survey, store: LaggingStore) -> bool:
    """Return True if a store must be rebuilt: it is made otherwise, or documents were removed or enough added since.

    The live one counts, because a run may have been killed before publishing its own, or a check may have refused that.
    Its documents are those of the build that it was made from.
    """
    with ledger.session() as session:
        release = session.get(Release, store.options.name)
        if release is None or (last := release.build).source is None:
            return True
        wanted = parameters_of(store.options, store.by)
        if any(last.parameters.get(key) != value for key, value in wanted.items()):
            return True
        path, source = Path(last.path), Path(last.source.path)
    try:
        load_manifest(path, store.kind)
        open_store(path).close()  # an earlier version may have made it
        made, held = load_manifest(source).parameters["plan"], store_digests(source)
    except (DraftstoreError, KeyError):
        return True
    if held is None or not made_with(surveyed.tokenizer).items() <= made.items():
        return True
    change = change_since(source, held, surveyed.contents.digests)
    if change.removed or len(change.added) >= max(store.after * (change.kept + change.removed), 1):
        return True
    ledger.logger.info(
        "%s: less than %.0f %% of documents are new since its build", store.options.name, 100 * store.after
    )
    return False


def make_lagging(ledger: Ledger, surveyed: Survey, rest: Built, store: LaggingStore) -> Built:
    """Find or make a store: of trees from the REST store, after counting it; of vectors from all token ids."""
    if isinstance(store.options, CrestOptions):
        make_counts(ledger, surveyed.contents.name, rest, store.options.max_n, store.head)
        return make_store(ledger, store.kind, store.options, store.by, rest)
    assert isinstance(store.by, ModelSources)
    return make_store(ledger, store.kind, store.options, store.by, tokenize_all(ledger, surveyed))
