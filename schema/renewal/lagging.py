"""Stores that lag behind a collection's REST store: built again when enough has changed."""

from pathlib import Path
from typing import NamedTuple

from draftstore.errors import DraftstoreError
from draftstore.storage.manifest import load_manifest
from draftstore.stores.crest.build import CrestOptions
from draftstore.stores.dresd.build import DresdOptions
from draftstore.stores.kind import ModelSources
from draftstore.stores.registry import open_store
from draftstore.text.tokenizing import made_with
from schema.catalogue.lineage import store_digests
from schema.models import Release
from schema.renewal.ledger import Built, Ledger
from schema.renewal.making import Sources, make_counts, make_store, parameters_of
from schema.renewal.rest import change_since
from schema.renewal.survey import Survey, tokenize_all


class LaggingStore(NamedTuple):
    """A store beside a collection's REST store.

    Attributes:
        kind: its kind.
        options: what determines its bytes; with others, it is due immediately. Its name is that of its release.
        by: what reads its texts.
        after: minimum share of new documents for it to be due.
        head: how many n-grams of each n the database gets.
    """

    kind: str
    options: CrestOptions | DresdOptions
    by: Sources
    after: float
    head: int = 0


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
