"""Live logs and the memory of services, once a store holds their documents."""

from functools import partial
from pathlib import Path

from draftstore.live import log
from draftstore.live.texts import identified
from draftstore.text.digests import answer_digest
from schema.catalogue.lineage import store_digests
from schema.collections.live_logs import forget, live_logs
from schema.models import Release
from schema.renewal.ledger import Ledger
from schema.renewal.survey import Survey


def put_to_rest(ledger: Ledger, surveyed: Survey) -> dict[str, int]:
    """Clear removed documents from live logs and those of the live build from memory; delete unwanted segments.

    Returns:
        How many segments were put to `rest` and how many were `deleted`.
    """
    collection, tokenizer = surveyed.collection, surveyed.tokenizer
    forget(collection, surveyed.scan)
    with ledger.session() as session:
        release = session.get(Release, collection.name)
        held = None if release is None else store_digests(Path(release.build.path))
    published = set() if held is None else set(map(bytes, held))
    unwanted = set(map(bytes, surveyed.scan.digests)) - set(map(bytes, surveyed.contents.digests))
    unwanted.add(answer_digest(""))

    def is_in(digests: set[bytes], document: log.Document) -> bool:
        return identified(document, tokenizer).digest in digests

    counts = {"rest": 0, "deleted": 0}
    for folder in live_logs(collection):
        counts["rest"] += log.put_to_rest(folder, partial(is_in, published | unwanted))
        counts["deleted"] += log.drop_rested(folder, partial(is_in, unwanted))
    return counts
