"""Live logs as sources of collections: they are ours, so a take-down changes them and a proof reads them."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import select
from sqlalchemy.orm import Session

from draftstore.errors import DraftstoreError, TokenizerError
from draftstore.live.removing import answers_of, still_held, take_down
from draftstore.live.texts import LiveTexts, adopt
from draftstore.text.digests import DIGEST_BYTES
from draftstore.text.fragments import Fragment
from draftstore.text.scans import Scan, documents_of
from draftstore.text.tokenizer import TextTokenizer, load_tokenizer
from schema.catalogue.builds import CatalogueError
from schema.collections.models import Collection, CollectionRemoval, CollectionSource


class Held(NamedTuple):
    """The removed documents that a live log and its processes still hold.

    Attributes:
        place: its folder.
        log: number of removed documents in it.
        memory: number of running processes that may hold some.
    """

    place: str
    log: int
    memory: int


def live_logs(collection: Collection) -> list[Path]:
    """Return the folders of a collection's live logs."""
    return [Path(row.place) for row in collection.sources if row.kind == "live"]


def fragments_of(collection: Collection) -> tuple[Fragment, ...]:
    """Return the texts that the removals of a collection refuse in any document."""
    rules = (row.rule for row in in_force(collection))
    return tuple(Fragment(**rule["containing"]) for rule in rules if "containing" in rule)


def adopt_live_logs(session: Session, collection: Collection) -> None:
    """Give a collection's live logs its tokenizer; see `add_sources`."""
    if not (logs := live_logs(collection)):
        return
    rivals = select(Collection.name).join(CollectionSource).where(Collection.id != collection.id)
    rivals = rivals.where(CollectionSource.kind == "live", CollectionSource.place.in_(map(str, logs)))
    if (rival := session.scalars(rivals).first()) is not None:
        raise CatalogueError(
            f"the collection {rival} has this live log: only its stores decide what leaves the memory"
        )
    if collection.tokenizer is None:
        raise TokenizerError(
            f"a live log holds token ids: name the tokenizer of the collection {collection.name} with --tokenizer"
        )
    tokenizer = load_tokenizer(collection.tokenizer)
    for folder in logs:
        adopt(folder, tokenizer)


def live_reading(row: CollectionSource, tokenizer: TextTokenizer | None) -> dict[str, Any]:
    """Return what a `Source` needs to read a live log."""
    assert tokenizer is not None, "see adopt_live_logs"
    texts = LiveTexts(Path(row.place), tokenizer)
    return {"find": texts.find, "read": texts.read, "template": tokenizer.fingerprint}


def answers_in(collection: Collection, scan: Scan, digests: NDArray[np.uint8]) -> set[str]:
    """Return the digests, in hexadecimal, of live logs' answers whose documents a scan has from a response log."""
    return {
        found
        for folder in live_logs(collection)
        for found in answers_of(folder, (document.text for document in documents_of(scan, digests)))
    }


def forget(collection: Collection, removals: Iterable[CollectionRemoval], answers: Iterable[str] = ()) -> int:
    """Overwrite removed documents in a collection's live logs, drop them from memory, and return their number.

    Args:
        collection: the collection.
        removals: those that apply.
        answers: digests of other documents to overwrite, in hexadecimal; see `answers_in`.

    Raises:
        DraftstoreError: a process did not drop them in time; no log contains them any more.
        OSError: a log cannot be written.
    """
    erased, failures = 0, []
    digests, fragments = _rules_of(removals)
    digests |= set(answers)
    for folder in live_logs(collection) if digests or fragments else ():
        try:
            erased += take_down(folder, digests, fragments)
        except (DraftstoreError, OSError) as error:  # the other logs are still overwritten
            failures.append(error)
    if failures:
        raise failures[0]
    return erased


def check_live_logs(collection: Collection) -> list[Held]:
    """Return the removed documents that a collection's live logs still hold, one row per log."""
    rules = _rules_of(collection.removals)
    return [Held(str(folder), *still_held(folder, *rules)) for folder in live_logs(collection)]


def _rules_of(removals: Iterable[CollectionRemoval]) -> tuple[set[str], tuple[Fragment, ...]]:
    """Return the digests (hexadecimal) and fragments of removals."""
    rows = list(removals)
    found = b"".join(row.digests for row in rows)
    starts = range(0, len(found), DIGEST_BYTES)
    return {found[at : at + DIGEST_BYTES].hex() for at in starts}, fragments_of(rows)
