"""Collections in the catalogue: named sets of sources, as flows scan them.

    with transaction() as session:
        collection = get_collection(session, "chat")
    scan = scan_collection(collection, open_tokenizer(collection))
    digests = wanted_of(collection, scan)

Functions that take a session run in the caller's transaction.
"""

import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from sqlalchemy import select
from sqlalchemy.orm import Session

from draftstore.errors import CorpusError, EarlierVersionError
from draftstore.options import Bytes, Duration, Shown, require_name
from draftstore.storage.files import escaped
from draftstore.storage.mirroring import is_url, mirror
from draftstore.storage.report import OnProgress, ignore
from draftstore.text.corpus import DATA_PATTERNS, SOURCE_PATTERNS, Source, no_template
from draftstore.text.digests import IDENTITY
from draftstore.text.records import read_documents
from draftstore.text.scans import Scan, require_current, scan_sources
from draftstore.text.selecting import RecordOptions
from draftstore.text.tokenizer import TextTokenizer, load_tokenizer
from draftstore.text.tokenizing import made_with
from draftstore.text.wanted import Cap, wanted_digests
from schema.catalogue.builds import CatalogueError, storable
from schema.catalogue.lineage import descends_from
from schema.collections.live_logs import adopt_live_logs, live_reading
from schema.collections.models import Collection, CollectionSource
from schema.collections.removal_files import (
    collection_folder,
    complete,
    fragments_of,
    removals_of,
    remove_files,
    scan_path,
)
from schema.models import Release

TREES, VECTORS = DERIVED = ("-crest", "-dense")
"""Suffixes that `rebuild` appends to a collection's name for the releases of its stores."""


class SourceOptions(RecordOptions):
    """How a source is read and which of its documents are wanted; see `CollectionSource`."""

    globs: Annotated[tuple[str, ...], Shown(metavar="G", flags=("--glob",))] = Field(
        (), description="Files of a folder to read, such as '*.md'. May be repeated."
    )
    licence: Annotated[str | None, Shown(metavar="TEXT")] = Field(None, description="Licence, as a note.")
    retention: Duration | None = Field(
        None,
        gt=timedelta(0),
        description="Expire documents this long after they were first seen, such as 90d.",
    )
    max_bytes: Bytes | None = Field(
        None, gt=0, lt=1 << 63, description="Maximum text of each source, such as 10GB."
    )
    first_out: Literal["oldest", "largest"] = Field(
        "oldest", description="Documents to drop first above --max-bytes."
    )


NOTES = (".md", ".txt", ".rst", ".yaml", ".yml")
"""Endings of what lies beside records in a data set."""


class NewSource(SourceOptions):
    """A source to add."""

    place: str
    log: bool = False
    live: bool = False

    @property
    def kind(self) -> str:
        """Return its kind in the catalogue."""
        return "url" if is_url(self.place) else "live" if self.live else "log" if self.log else "files"

    def source(self) -> Source:
        """Return it as it is on this machine, without a template."""
        records, patterns = RecordOptions.of(self), self.globs or SOURCE_PATTERNS
        return Source(0, self.place, log=self.log, records=records, glob=patterns)

    def settled(self) -> "NewSource":
        """Return it with an absolute path, and patterns if it is a folder of records; CorpusError if it is unusable."""
        if is_url(self.place):
            if self.log or self.live:
                raise CorpusError(
                    f"{self.place} is not a {'live' if self.live else 'response'} log: give its own path"
                )
            return self
        if self.live:
            self.refuse(f"the live log {self.place}")
        place = os.path.abspath(Path(self.place).expanduser())  # noqa: PTH100 (links may move on purpose)
        if self.live and Path(place).exists() and not Path(place).is_dir():
            raise CorpusError(
                f"{place} is not a live log: give the folder that `--live` of the service or worker names"
            )
        if place != escaped(place):
            raise CorpusError(
                f"{place} is not named in UTF-8: add it by a pattern, such as '/data/caf*.jsonl'"
            )
        settled = self.changed(place=place)
        if self.kind == "files" and not self.globs:
            records = settled.changed(globs=DATA_PATTERNS)
            if all(name.endswith(NOTES) for name in settled.names()) and records.names():
                return records  # a data set, maybe with its README
        if self.kind == "files":
            settled.source().files()
        return settled

    def names(self) -> list[str]:
        """Return the names of its files, none if they cannot be found."""
        try:
            return [file.name for file in self.source().files()]
        except CorpusError:
            return []


def add_sources(
    session: Session, name: str, sources: Sequence[NewSource], tokenizer: str | None = None
) -> Collection:
    """Add sources to a collection, which is created if it is new; known places take the new settings.

    `tokenizer` is a folder, file or hub name; None leaves it unchanged. What does not fit together is refused: a name
    whose release others use, a missing file, a conversation without a tokenizer, a live log of another collection.
    """
    settled = [source.settled() for source in sources]
    if session.scalars(select(Collection.id).filter_by(name=name)).one_or_none() is None:
        for release in releases_of(name):
            require_name(release, "a collection or of its releases", CatalogueError)
        _require_own_releases(session, name)
        session.add(Collection(name=name, identity=IDENTITY))
        session.flush()
    collection = get_collection(session, name, lock=True)
    if tokenizer:
        path = Path(tokenizer).expanduser()
        collection.tokenizer = storable(str(path.resolve()) if path.exists() else tokenizer)
    for source in settled if not collection.tokenizer else ():
        for file in source.source().files() if source.kind in ("files", "log") else ():
            if file.kind != "text":
                next(filter(None, read_documents(file, source, no_template)), None)
    known = {source.place: source for source in collection.sources}
    for source in settled:
        row = known.get(str(storable(source.place))) or CollectionSource(place=storable(source.place))
        row.kind, row.column_name, row.globs = source.kind, storable(source.column), list(source.globs)
        row.fields, row.condition = storable(source.fields), storable(source.where)
        row.licence = storable(source.licence)
        row.retention, row.max_bytes, row.first_out = source.retention, source.max_bytes, source.first_out
        if row not in collection.sources:
            collection.sources.append(row)
    session.flush()
    adopt_live_logs(session, collection)
    return get_collection(session, name)


def releases_of(name: str) -> tuple[str, ...]:
    """Return the names under which a collection's stores are published."""
    return name, *(name + suffix for suffix in DERIVED)


def _require_own_releases(session: Session, name: str) -> None:
    """Refuse a name whose releases belong to another collection or to a build not made from this collection."""
    stems = [name.removesuffix(suffix) for suffix in DERIVED if name.endswith(suffix)]
    rivals = Collection.name.in_((*stems, *releases_of(name)[1:]))
    if (rival := session.scalars(select(Collection.name).where(rivals)).first()) is not None:
        raise CatalogueError(
            f"the collections {rival} and {name} would publish the same release, "
            f"{max(rival, name, key=len)}: choose another name"
        )
    for release in session.scalars(select(Release).where(Release.name.in_(releases_of(name)))):
        if not descends_from(release.build, name):
            raise CatalogueError(
                f"the release {release.name} holds build {release.build_id}, a {release.build.kind} store that the "
                f"collection {name} did not make: choose another name, or `draftstore releases remove {release.name}`"
            )


def get_collection(session: Session, name: str, *, lock: bool = False) -> Collection:
    """Return a collection with its sources and removals, which can be read after the session is closed.

    Removals missing from the files or the database are restored there; see `schema.collections.removal_files`.
    EarlierVersionError: it is of an earlier version, which knew documents by other digests.
    """
    found = find_collection(session, name, lock=lock)
    if found.identity == IDENTITY:
        with suppress(EarlierVersionError):
            complete(session, found)
            require_current(scan_path(name))
            return found
    raise EarlierVersionError(
        f"the collection {name} was made by an earlier version, which knew documents by their rendered text: note its "
        f"sources and removals (`draftstore corpus show {name}`), drop it (`draftstore corpus drop {name}`), and say "
        "them again; docs/operations.md, Upgrade, has the steps"
    )


def find_collection(session: Session, name: str, *, lock: bool = False) -> Collection:
    """Return a collection as it is in the database, of whatever version; CatalogueError if there is none."""
    query = select(Collection).filter_by(name=name).execution_options(populate_existing=True)
    found = session.scalars(query.with_for_update(of=Collection) if lock else query).one_or_none()
    if found is None:
        raise CatalogueError(f"no collection {name!r}: `draftstore corpus list` shows all")
    return found


def list_collections(session: Session) -> list[Collection]:
    """Return all collections sorted by name, with their sources and removals."""
    return list(session.scalars(select(Collection).order_by(Collection.name)))


def drop_collection(session: Session, name: str) -> None:
    """Remove a collection, its scan and its take-downs, but no stores and texts; CatalogueError if there is none."""
    session.delete(find_collection(session, name, lock=True))
    session.flush()
    remove_files(name)


def open_tokenizer(collection: Collection) -> TextTokenizer | None:
    """Load the tokenizer of a collection, or return None if it names none; TokenizerError if it cannot be loaded."""
    return load_tokenizer(collection.tokenizer) if collection.tokenizer else None


def _sources_here(collection: Collection, tokenizer: TextTokenizer | None, folder: Path) -> list[Source]:
    """Return the sources of a collection on this machine; objects are mirrored first."""
    refused = fragments_of(collection)
    rendering: dict[str, Any] = {}
    if tokenizer:
        rendering = {"render": tokenizer.render_document, "template": json.dumps(made_with(tokenizer))}
    return [
        Source(
            row.id,
            str(mirror(row.place, folder / "mirror" / str(row.id)).path) if row.kind == "url" else row.place,
            log=row.kind in ("live", "log"),
            records=RecordOptions(column=row.column_name, fields=row.fields, where=row.condition),
            glob=tuple(row.globs) or SOURCE_PATTERNS,
            refused=refused,
            added=int(row.added_at.timestamp()),
            **(live_reading(row, tokenizer) if row.kind == "live" else rendering),
        )
        # Live logs last: of an answer that is also in a response log, the whole conversation is read.
        for row in sorted(collection.sources, key=lambda row: row.kind == "live")
    ]


def scan_collection(
    collection: Collection,
    tokenizer: TextTokenizer | None,
    *,
    now: float | None = None,
    on_progress: OnProgress = ignore,
) -> Scan:
    """Scan a collection's sources, see `scan_sources`; CorpusError if it has none, or one cannot be read."""
    folder = collection_folder(collection.name)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not collection.sources:
        raise CorpusError(f"{collection.name} has no sources: `draftstore corpus add {collection.name} PATH`")
    sources = _sources_here(collection, tokenizer, folder)
    return scan_sources(sources, scan_path(collection.name), now=now, on_progress=on_progress)


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
