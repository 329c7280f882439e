"""Live logs as sources of collections: they are ours, so a take-down changes them and a proof reads them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from draftstore.errors import DraftstoreError, TokenizerError
from draftstore.live.log import documents, segments
from draftstore.live.removing import Held, TakeDowns, still_held, take_down
from draftstore.live.source import LiveTexts, adopt, identified, tokenizer_of
from draftstore.text.digests import split_digests
from draftstore.text.scans import Scan
from draftstore.text.tokenizer import TextTokenizer, load_tokenizer
from draftstore.text.wanted import removed_rows
from schema.catalogue.builds import CatalogueError
from schema.collections.models import Collection, CollectionSource
from schema.collections.removal_files import fragments_of, removals_of


def live_logs(collection: Collection) -> list[Path]:
    """Return the folders of a collection's live logs."""
    return [Path(row.place) for row in collection.sources if row.kind == "live"]


def adopt_live_logs(session: Session, collection: Collection) -> None:
    """Give a collection's live logs its tokenizer; see `add_sources`."""
    if not (logs := live_logs(collection)):
        return
    rivals = select(Collection.name, CollectionSource.place).join(CollectionSource)
    rivals = rivals.where(CollectionSource.kind == "live", Collection.id != collection.id)
    for rival, place in session.execute(rivals):
        if Path(place).resolve() in [folder.resolve() for folder in logs]:
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


def live_texts(collection: Collection) -> Iterator[tuple[bytes, str]]:
    """Yield the digest of each document in a collection's live logs, with all its text, the end of its prompt too."""
    for folder in live_logs(collection):
        tokenizer = tokenizer_of(folder)
        for path in segments(folder):
            for _, found in documents(path):
                yield identified(found, tokenizer).digest, tokenizer.decode(found.ids)


def forget(collection: Collection, scan: Scan | None) -> int:
    """Put the removals in force into a collection's live logs; return how many documents were overwritten.

    A scan also finds the documents that rules remove. DraftstoreError if a process did not drop them.
    """
    if not (logs := live_logs(collection)):
        return 0
    erased, failures, wanted = 0, [], take_downs(collection, scan)
    for folder in logs:
        try:
            erased += take_down(folder, wanted)
        except (DraftstoreError, OSError) as error:  # the other logs are still overwritten
            failures.append(error)
    if failures:
        raise failures[0]
    return erased


def check_live_logs(collection: Collection, scan: Scan) -> list[Held]:
    """Return what a collection's live logs may still hold of removed documents, one row per log."""
    if not (logs := live_logs(collection)):
        return []
    wanted = take_downs(collection, scan)
    return [still_held(folder, wanted, collection.vouched_for(folder)) for folder in logs]


def take_downs(collection: Collection, scan: Scan | None) -> TakeDowns:
    """Return what was removed from a collection; with a scan, also what rules have matched since."""
    found = removed_digests(collection, scan)
    return TakeDowns(documents=found["digest"], answers=found["answer"], containing=fragments_of(collection))


def removed_digests(collection: Collection, scan: Scan | None) -> dict[str, frozenset[bytes]]:
    """Return the digests of what was removed, by column of a scan: `digest`, `text` and `answer`."""
    found = {
        name: {each for row in collection.in_force for each in split_digests(getattr(row, f"{name}s"))}
        for name in ("digest", "text", "answer")
    }
    if scan is not None:
        rows = scan.frame.filter(removed_rows(scan, removals_of(collection)))
        for name, digests in found.items():
            digests.update(rows[name].drop_nulls())
    return {name: frozenset(digests) for name, digests in found.items()}
