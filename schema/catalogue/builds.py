"""Builds and corpora in the catalogue. Functions run in the caller's transaction; the caller commits.

The process of a running build holds an advisory lock, keyed by the build's id. PostgreSQL releases it when the process
ends, in whatever way, so a build that is `running` without a lock was cut off. A builder that loses its connection, as
on a server restart, also counts as cut off; it can still finish its build.
"""

import atexit
import dataclasses
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, delete, func, select, text, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from draftstore.errors import DraftstoreError, StoreError
from draftstore.storage.files import escaped
from draftstore.storage.manifest import Manifest, load_manifest, manifest_digest
from schema.db.database import is_lent
from schema.db.errors import DatabaseError
from schema.db.partitions import drop_partition
from schema.models import PARTITIONED, Build, Corpus, Release, Replay

CUT_OFF = "its process ended without an error message: run it again, finished steps are kept"
DROP_LOCK_TIMEOUT = "10s"
NAMED_SOURCES = 3
"""Maximum files and folders in the name of a corpus."""
LOCK_CLASS = 0x64726166  # "draf": first half of the lock keys; the second is the build's id

NOT_HELD = f"""
NOT EXISTS (
    SELECT FROM pg_locks
    WHERE locktype = 'advisory' AND granted AND objsubid = 2
      AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
      AND classid = {LOCK_CLASS} AND objid = builds.id
)"""  # noqa: S608 - a constant
"""Condition on rows of `builds`: no process holds their lock."""

_held: dict[tuple[str, int], Connection] = {}


class CatalogueError(DraftstoreError):
    """The catalogue refuses a request: unknown build or release, or a build that is unfinished, invalid or live."""


def record_corpus(session: Session, manifest: Manifest) -> Corpus | None:
    """Return the corpus of a store, recording a new one; None if the manifest names none."""
    fingerprint = manifest.corpus.get("fingerprint")
    if fingerprint is None:
        return None
    identity = {"fingerprint": fingerprint, "tokenizer_fingerprint": manifest.tokenizer.fingerprint}
    sources = manifest.corpus.get("sources", [])
    named = ", ".join(Path(source).name for source in sources[:NAMED_SOURCES]) or manifest.name
    new = insert(Corpus).values(
        **identity,
        name=storable(named + (", ..." if len(sources) > NAMED_SOURCES else "")),
        sources=storable(sources),
        tokenizer=storable(manifest.tokenizer.name),
        documents=manifest.counts["documents"],
        tokens=manifest.counts["tokens"],
        characters=manifest.corpus.get("characters"),
    )
    session.execute(new.on_conflict_do_nothing())
    return session.scalars(select(Corpus).filter_by(**identity)).one()


def start_build(
    session: Session,
    kind: str,
    name: str,
    path: Path,
    *,
    parameters: dict[str, Any] | None = None,
    source_id: int | None = None,
    backends: Sequence[str] = (),
) -> Build:
    """Record the start of a build by this process.

    Until the build finishes or fails, or the process ends, `fail_cut_off` sees that it is alive. The arguments are
    columns of `builds`; `path` is the directory of the future store.
    """
    build = Build(
        kind=kind,
        name=storable(name),
        path=_stored_path(path),
        parameters=storable(parameters or {}),
        source_id=source_id,
        backends=list(backends),
    )
    session.add(build)
    _written(session, build)
    _hold(session.get_bind().engine, build.id)  # before others can see the row
    return build


def finish_build(session: Session, build_id: int, *, timings: dict[str, float] | None = None) -> Build:
    """Record the finished store of a build, with the contents of its manifest and the seconds of each step."""
    build = get_build(session, build_id, lock=True)
    if build.state == "finished":
        raise CatalogueError(f"build {build.id} is already finished: start another one")
    _describe(session, build, Path(build.path))
    build.timings = timings or {}
    _written(session, build)
    let_go(session.get_bind().engine, build.id)
    return build


def fail_build(
    session: Session, build_id: int, error: str, *, timings: dict[str, float] | None = None
) -> Build:
    """Record in one sentence why a build failed; raise CatalogueError if it is finished."""
    build = get_build(session, build_id, lock=True)
    if build.state == "finished":
        raise CatalogueError(f"build {build.id} is finished: it can no longer fail")
    build.state, build.error, build.finished_at = "failed", storable(error), func.now()
    build.timings = timings or build.timings
    _written(session, build)
    let_go(session.get_bind().engine, build.id)
    return build


def fail_cut_off(session: Session) -> list[int]:
    """Mark running builds as failed if their process is gone; return their ids."""
    gone = (
        update(Build)
        .where(Build.state == "running", text(NOT_HELD))
        .values(state="failed", error=CUT_OFF, finished_at=func.now())
        .returning(Build.id)
        .execution_options(synchronize_session=False)
    )
    ids = sorted(session.scalars(gone))
    session.expire_all()
    return ids


def add_build(session: Session, path: Path) -> Build:
    """Return the build of a finished store, registering one that is new at this path; StoreError if there is none."""
    manifest = load_manifest(path)
    known = _registered(session, path)
    if known is not None:
        return known
    build = Build(kind=manifest.kind, name=storable(manifest.name), path=_stored_path(path), timings={})
    build.started_at = func.now()
    _describe(session, build, path)
    session.add(build)
    _written(session, build)
    return build


def _registered(session: Session, path: Path) -> Build | None:
    known = select(Build).filter_by(path=_stored_path(path), digest=manifest_digest(path))
    return session.scalars(known).one_or_none()


def _describe(session: Session, build: Build, path: Path) -> None:
    manifest = load_manifest(path, build.kind)
    other = _registered(session, path)
    if other is not None and other is not build:
        raise CatalogueError(f"the store in {path} is already build {other.id}")
    corpus = record_corpus(session, manifest)
    build.corpus_id = corpus.id if corpus else None
    build.digest = manifest_digest(path)
    build.backends = list(manifest.parameters.get("backends", build.backends or []))
    build.parameters = {**storable(manifest.parameters), **(build.parameters or {})}
    build.manifest = storable(dataclasses.asdict(manifest))
    build.size_bytes = manifest.size
    build.source_id = build.source_id or _source(session, manifest)
    build.state, build.finished_at, build.error = "finished", func.now(), None


def _source(session: Session, manifest: Manifest) -> int | None:
    """Return the build that a store was made from; if that store still lies where it was, it is registered too."""
    plan, path = manifest.parameters.get("plan"), Path(str(manifest.parameters.get("source")))
    digest = plan.get("source") if isinstance(plan, dict) else None
    if isinstance(digest, str) and (known := _by_digest(session, digest)):
        return known
    with suppress(StoreError, OSError):
        return add_build(session, path).id if manifest_digest(path) == digest else None
    return None


def _by_digest(session: Session, digest: str) -> int | None:
    newest = select(Build.id).filter_by(digest=digest, state="finished").order_by(Build.id.desc()).limit(1)
    return session.scalars(newest).one_or_none()


def digest_at(path: Path) -> str | None:
    """Return the digest of the store in a directory; None if there is no finished one."""
    try:
        return manifest_digest(path)
    except StoreError:
        return None


def get_build(session: Session, build_id: int, *, lock: bool = False) -> Build:
    """Return a build; `lock` rereads its row and locks it until the end of the transaction."""
    query = select(Build).filter_by(id=build_id)
    if lock:
        query = query.with_for_update(key_share=True).execution_options(populate_existing=True)
    build = session.scalars(query).one_or_none()
    if build is None:
        raise CatalogueError(
            f"the catalogue has no build {build_id}: `draftstore catalogue list` shows all builds"
        )
    return build


def find_build(session: Session, reference: str | int | Path) -> Build:
    """Return a build by its id or by its store's directory, even if that has moved since registration."""
    if str(reference).isdecimal():
        return get_build(session, int(str(reference)))
    path = Path(str(reference))
    build = _registered(session, path)
    build_id = build.id if build else _by_digest(session, manifest_digest(path))
    if build_id is None:
        raise CatalogueError(
            f"the catalogue does not know the store {path}: `draftstore catalogue add {path}` adds it"
        )
    return get_build(session, build_id)


def list_builds(
    session: Session,
    *,
    kind: str | None = None,
    name: str | None = None,
    state: str | None = None,
    limit: int | None = None,
) -> list[Build]:
    """Return builds, newest first."""
    filters = {"kind": kind, "name": name, "state": state}
    query = select(Build).filter_by(**{key: value for key, value in filters.items() if value})
    return list(session.scalars(query.order_by(Build.id.desc()).limit(limit)))


def drop_build(session: Session, build_id: int) -> None:
    """Remove a build with its statistics, trees and replays, unless it is live or running; its directory stays."""
    session.execute(text(f"SET LOCAL lock_timeout = '{DROP_LOCK_TIMEOUT}'"))
    fail_cut_off(session)
    build = get_build(session, build_id, lock=True)
    live = session.scalars(select(Release.name).filter_by(build_id=build_id).order_by(Release.name)).all()
    if live:
        raise CatalogueError(
            f"build {build_id} is live: the release {', '.join(live)} points at it; publish another build first"
        )
    if build.state == "running":
        raise CatalogueError(
            f"build {build_id} is still running: wait until it has finished, or end its process"
        )
    for table in PARTITIONED:
        session.execute(text(drop_partition(table, build_id)))
    session.execute(delete(Build).filter_by(id=build_id))


def record_replay(
    session: Session, build_id: int, summary: dict[str, Any], *, recordings: Path, **columns: Any
) -> Replay:
    """Record the result of a replay, `ReplayResult.summary()`, with further columns of `replays`."""
    same = ("rows", "tokens", "passes", "accepted_length", "nodes_mean", "miss_rate")
    replay = Replay(
        build_id=build_id,
        recordings=storable(recordings.name),
        **columns,
        lookup_p50_us=summary["lookup_us"]["p50"],
        lookup_p99_us=summary["lookup_us"]["p99"],
        **{key: summary[key] for key in same},
    )
    session.add(replay)
    _written(session, replay)
    return replay


def _written(session: Session, row: Build | Replay) -> None:
    session.flush()
    session.refresh(row)


def _stored_path(path: Path) -> str:
    return str(storable(str(path.resolve())))


def storable(value: Any) -> Any:
    """Return a JSON value that PostgreSQL accepts: non-UTF-8 bytes of a path and NUL stay escaped."""
    match value:
        case str():
            return escaped(value.replace("\0", r"\x00"))
        case dict():
            return {storable(key): storable(item) for key, item in value.items()}
        case list() | tuple():
            return [storable(item) for item in value]
        case Path():
            return storable(str(value))
        case _:
            return value


def _hold(engine: Engine, build_id: int) -> None:
    """Mark a build as made by this process, until `let_go` or the end of the process; no pooler may be between."""
    connection = engine.connect().execution_options(isolation_level="AUTOCOMMIT")
    connection.detach()  # never returns to the pool: closing it releases the lock
    with engine.connect() as other:
        lent = is_lent(_driver(connection), _driver(other))
    if lent:
        _close(connection)
        raise DatabaseError(
            "a build holds a lock as long as its session, which lasts only for a transaction behind the pooler that "
            "DRAFTSTORE_DATABASE_URL names: name the PostgreSQL server itself (its direct URL), and try again"
        )
    connection.execute(text(f"SELECT pg_advisory_lock({LOCK_CLASS}, {build_id:d})"))
    _held[_key(engine, build_id)] = connection


def _driver(connection: Connection) -> Any:
    return connection.connection.dbapi_connection


def let_go(engine: Engine, build_id: int) -> None:
    """Release a build's lock if this process holds it."""
    connection = _held.pop(_key(engine, build_id), None)
    if connection is not None:
        _close(connection)


def _key(engine: Engine, build_id: int) -> tuple[str, int]:
    return engine.url.render_as_string(), build_id


def _close(connection: Connection) -> None:
    try:
        connection.close()
    except (DBAPIError, DraftstoreError):  # the server is already gone
        connection.invalidate()


@atexit.register
def _let_go_of_all() -> None:
    while _held:
        _close(_held.popitem()[1])
