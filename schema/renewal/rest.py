"""The REST store of a collection, made from its previous one: only new documents are tokenized and sorted."""

import dataclasses
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftstore.errors import BuildRunningError, DraftstoreError
from draftstore.storage.files import locked_directory, remove
from draftstore.storage.manifest import load_manifest, verify_files
from draftstore.stores.rest.store import KIND as REST
from draftstore.stores.rest.store import RestStore, read_digests
from draftstore.stores.rest.updating import update_rest
from draftstore.text.digests import digest_keys
from draftstore.text.tokenizing import made_with
from schema.catalogue.builds import list_builds
from schema.collections.removal_files import collection_folder
from schema.db.home import data_home
from schema.renewal.ledger import Built, Ledger, Request
from schema.renewal.making import store_path
from schema.renewal.progress import StepLogs
from schema.renewal.survey import Survey, tokenize_some

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
