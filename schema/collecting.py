"""Collections in the catalogue: named sets of sources, as flows scan them.

    with transaction() as session:
        collection = get_collection(session, "chat")
    folder = collection_folder("chat")
    sources = open_sources(collection, tokenizer, folder)
    scan = scan_sources(sources, scan_path(folder))
    digests = wanted_of(collection, scan, now=time.time())

Functions that take a session run in the caller's transaction. `scan_collection` does what lies between.
"""

import dataclasses
import os
import re
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import select
from sqlalchemy.orm import Session, selectinload

from draftstore.errors import CorpusError
from draftstore.mirroring import is_url, mirror
from draftstore.text.chat import Message
from draftstore.text.corpus import SOURCE_PATTERNS
from draftstore.text.digests import DIGEST_BYTES
from draftstore.text.fragments import Fragment
from draftstore.text.scanning import OnScan, scan_sources
from draftstore.text.scans import Scan
from draftstore.text.sources import Source, no_template
from draftstore.text.tokenizer import TextTokenizer, load_tokenizer
from draftstore.text.wanted import Cap, Removal, wanted_digests
from schema.builds import CatalogueError, storable
from schema.collection_models import Collection, CollectionRemoval, CollectionSource
from schema.home import data_home
from schema.models import RELEASE_NAME, Release

NAME_CHARACTERS = 200
"""Folders and releases have a collection's name with a few characters more."""
TREES, VECTORS = DERIVED = ("-crest", "-dense")
"""What `rebuild` appends to a collection's name for the releases of stores made from it."""


@dataclasses.dataclass(frozen=True)
class NewSource:
    """A source to add; see `CollectionSource` for the fields."""

    place: str
    log: bool = False
    column: str = "text"
    globs: tuple[str, ...] = ()
    licence: str | None = None
    retention: timedelta | None = None
    max_bytes: int | None = None
    first_out: str = "oldest"

    @property
    def kind(self) -> str:
        """Return its kind in the catalogue."""
        return "url" if is_url(self.place) else "log" if self.log else "files"

    def settled(self) -> "NewSource":
        """Return it with an absolute path.

        Raises:
            CorpusError: it is no log, and nothing is there; a log is a URL; or a limit leaves no room for any text.
        """
        if self.retention is not None and self.retention <= timedelta(0):
            raise CorpusError(
                f"{self.place} with a retention of nothing has no documents: give some time, as 90d"
            )
        if self.max_bytes is not None and not 0 < self.max_bytes < 1 << 63:
            raise CorpusError(
                f"{self.place} with at most {self.max_bytes:,} bytes: expected 1 to {(1 << 63) - 1:,}"
            )
        if is_url(self.place):
            if self.log:
                raise CorpusError(f"{self.place} is no response log: give the log's own path")
            return self
        place = os.path.abspath(Path(self.place).expanduser())  # noqa: PTH100 (links may move on purpose)
        if not self.log:
            Source(0, place, glob=self.globs or SOURCE_PATTERNS).files()
        return dataclasses.replace(self, place=place)


def add_sources(
    session: Session, name: str, sources: Sequence[NewSource], tokenizer: str | None = None
) -> Collection:
    """Add sources to a collection, which is made if it is new; known places take the new settings.

    Args:
        session: open session.
        name: name of the collection.
        sources: the sources.
        tokenizer: folder, file or hub name; None: as it was.

    Raises:
        CatalogueError: the name is invalid, another collection publishes under it, or the collection is new and a
            release under it is not its own.
        CorpusError: nothing is at a place, or see `NewSource.settled`.
    """
    if not re.fullmatch(RELEASE_NAME, name) or len(name) > NAME_CHARACTERS:
        raise CatalogueError(
            f"{name!r} cannot be the name of a collection: expected letters, digits, '.', '_' and '-', with a letter "
            f"or digit first, and at most {NAME_CHARACTERS} of them"
        )
    _require_own_releases(session, name)
    settled = [source.settled() for source in sources]
    found = session.scalars(select(Collection).filter_by(name=name).with_for_update()).one_or_none()
    if found is None:
        _require_free_releases(session, name)
    collection = found or Collection(name=name)
    session.add(collection)
    if tokenizer:
        given = Path(tokenizer).expanduser()
        collection.tokenizer = storable(str(given.resolve()) if given.exists() else tokenizer)
    known = {source.place: source for source in collection.sources}
    for source in settled:
        row = known.get(str(storable(source.place))) or CollectionSource(place=storable(source.place))
        row.kind, row.column_name, row.globs = source.kind, storable(source.column), list(source.globs)
        row.licence = storable(source.licence)
        row.retention, row.max_bytes, row.first_out = source.retention, source.max_bytes, source.first_out
        if row not in collection.sources:
            collection.sources.append(row)
    session.flush()
    return get_collection(session, name)


def _require_own_releases(session: Session, name: str) -> None:
    """Refuse a name whose releases another collection has: its rebuilds would publish them in turn.

    Raises:
        CatalogueError: one publishes under the other's name.
    """
    stems = [name.removesuffix(suffix) for suffix in DERIVED if name.endswith(suffix)]
    rivals = [*stems, *(name + suffix for suffix in DERIVED)]
    if (
        rival := session.scalars(select(Collection.name).where(Collection.name.in_(rivals))).first()
    ) is not None:
        raise CatalogueError(
            f"the collections {rival} and {name} would publish the same release, "
            f"{max(rival, name, key=len)}: choose another name"
        )


def _require_free_releases(session: Session, name: str) -> None:
    """Refuse a name under which a release of other texts is live: rebuilds would replace it, or fail on its kind."""
    names = [name, *(name + suffix for suffix in DERIVED)]
    for release in session.scalars(select(Release).where(Release.name.in_(names)).order_by(Release.name)):
        build = release.build
        parameters = {**(build.source.parameters if build.source else {}), **build.parameters}
        if parameters.get("collection") != name:
            raise CatalogueError(
                f"the collection {name} would publish the release {release.name}, which build {build.id} holds "
                f"({build.kind} {build.name!r}): choose another name, or retire that release by "
                f"`draftstore releases remove {release.name}`"
            )


def get_collection(session: Session, name: str, *, lock: bool = False) -> Collection:
    """Return a collection with its sources and removals, which can be read after the session is closed.

    Raises:
        CatalogueError: there is none of this name.
    """
    query = select(Collection).filter_by(name=name).execution_options(populate_existing=True)
    query = query.options(selectinload(Collection.sources), selectinload(Collection.removals))
    found = session.scalars(query.with_for_update(of=Collection) if lock else query).one_or_none()
    if found is None:
        raise CatalogueError(f"no collection {name!r}: `draftstore corpus list` shows all")
    return found


def list_collections(session: Session) -> list[Collection]:
    """Return all collections sorted by name, with their sources and removals."""
    loaded = selectinload(Collection.sources), selectinload(Collection.removals)
    return list(session.scalars(select(Collection).options(*loaded).order_by(Collection.name)))


def drop_collection(session: Session, name: str) -> None:
    """Remove the definition of a collection and its take-downs; stores and texts stay.

    Raises:
        CatalogueError: there is none of this name.
    """
    session.delete(get_collection(session, name, lock=True))
    session.flush()


def collection_folder(name: str) -> Path:
    """Return the folder of a collection's scan, mirrors, and hashes of what was removed."""
    return data_home() / "collections" / name


def scan_path(folder: Path) -> Path:
    """Return the file of a collection's scan."""
    return folder / "scan.parquet"


def open_tokenizer(collection: Collection) -> TextTokenizer | None:
    """Load the tokenizer of a collection; None if it names none.

    Raises:
        TokenizerError: it cannot be loaded.
    """
    return load_tokenizer(collection.tokenizer) if collection.tokenizer else None


def open_sources(collection: Collection, tokenizer: TextTokenizer | None, folder: Path) -> list[Source]:
    """Return the sources of a collection on this machine; objects are mirrored first.

    Args:
        collection: the collection.
        tokenizer: its chat template makes text of conversations; None: they count as bad records.
        folder: see `collection_folder`.

    Raises:
        CorpusError: objects cannot be mirrored.
    """
    refused = tuple(
        Fragment(**removal.rule["containing"])
        for removal in collection.removals
        if "containing" in removal.rule
    )

    def render(messages: Sequence[Message]) -> str:
        return (
            tokenizer.render_chat(messages, add_generation_prompt=False)
            if tokenizer
            else no_template(messages)
        )

    return [
        Source(
            row.id,
            str(mirror(row.place, folder / "mirror" / str(row.id)).path) if row.kind == "url" else row.place,
            log=row.kind == "log",
            column=row.column_name,
            glob=tuple(row.globs) or SOURCE_PATTERNS,
            render=render,
            template=tokenizer.template_fingerprint if tokenizer else "",
            refused=refused,
        )
        for row in collection.sources
    ]


def scan_collection(
    collection: Collection,
    tokenizer: TextTokenizer | None,
    *,
    now: float | None = None,
    on_progress: OnScan = lambda _done, _all, _documents: None,
) -> Scan:
    """Scan a collection's sources; see `scan_sources`.

    Raises:
        CorpusError: it has no sources, or one cannot be read.
    """
    folder = collection_folder(collection.name)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not collection.sources:
        raise CorpusError(f"{collection.name} has no sources: `draftstore corpus add {collection.name} PATH`")
    sources = open_sources(collection, tokenizer, folder)
    return scan_sources(sources, scan_path(folder), now=now, on_progress=on_progress)


def removals_of(collection: Collection) -> list[Removal]:
    """Return the take-downs of a collection."""
    return [removal_of(row) for row in collection.removals]


def removal_of(row: CollectionRemoval) -> Removal:
    """Return a take-down; texts that it refuses are the scan's to find, see `open_sources`."""
    rule = {key: row.rule.get(key) for key in ("document", "source", "before")}
    return Removal(np.frombuffer(row.digests, np.uint8).reshape(-1, DIGEST_BYTES), **rule)


def wanted_of(collection: Collection, scan: Scan, *, now: float | None = None) -> NDArray[np.uint8]:
    """Return the digests of a collection's documents that stores may hold; see `wanted_digests`."""
    return wanted_digests(
        scan,
        removals_of(collection),
        now=time.time() if now is None else now,
        retention={row.id: row.retention.total_seconds() for row in collection.sources if row.retention},
        caps={
            row.id: Cap(row.max_bytes, "largest" if row.first_out == "largest" else "oldest")
            for row in collection.sources
            if row.max_bytes
        },
    )
