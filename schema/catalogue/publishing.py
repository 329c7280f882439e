"""Moving releases: publishing a build, and rolling back to the previous one.

    publish(sessionmaker(make_engine()).begin, "chat-vicuna", build_id)

A move has three parts. A short transaction reads both builds, and the gates compare them (`gates`). Then every
byte of the new store is read, and the recordings of the release are replayed with both builds. This runs
outside a transaction: it takes minutes, and an open transaction would hold back vacuuming and be ended by
`idle_in_transaction_session_timeout`. A second short transaction checks that nothing has moved meanwhile and moves the
release. Readers see the old or the new build.
"""

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from sqlalchemy import func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from draftstore.errors import DraftstoreError, StoreError, counted
from draftstore.options import require_name
from draftstore.storage.manifest import Manifest, load_manifest, manifest_digest, verify_files
from draftstore.storage.report import OnProgress, ignore
from draftstore.stores.registry import KINDS, kind_of
from schema.catalogue.builds import CatalogueError, get_build, record_replay
from schema.catalogue.gates import (
    CHECKS,
    ROLLBACK_CHECKS,
    Candidate,
    Check,
    RefusedError,
    Verdict,
    judge,
    measure,
)
from schema.catalogue.recordings import Replayed, ReplayRule, rules_of
from schema.catalogue.releases import build_before, get_release, last_lengths
from schema.models import Build, Release, ReleaseMove

Transaction = Callable[[], AbstractContextManager[Session]]
"""Begins a transaction, committed at the end of the block: `sessionmaker(engine).begin`."""
Verify = Callable[[Candidate], list[str]]
"""Returns the problems of a store, one sentence each."""
Removals = Callable[[Session, Build], tuple[str, str]]
"""Returns which removed documents a build holds: `Candidate.removed` and `Candidate.warning`."""
Measure = Callable[[ReplayRule, list[Candidate]], list[Replayed]]
"""Replays a recording with some builds."""
GATES = "gates"
"""Key of the verdicts, by release, in the parameters of a build."""
PASSED = Verdict({}, {}, {}, {})


@dataclass(frozen=True)
class Moved:
    """A release after a move: its `build`, the id of the one `before`, the `verdict` of the gates.

    `live` is the build that it was compared with, with its replays; None if there was none.
    """

    name: str
    build: Candidate
    before: int | None
    moved_at: datetime
    verdict: Verdict
    live: Candidate | None = None

    @property
    def build_id(self) -> int:
        """Id of the build that it points at."""
        return self.build.id


def verify_present(build: Candidate) -> list[str]:
    """Return the problems of a store in milliseconds, without reading its files: it is gone or was replaced."""
    path = Path(build.path)
    try:
        load_manifest(path, build.kind)
        found = manifest_digest(path)
    except (DraftstoreError, OSError) as error:
        return [str(error)]
    if found != build.digest:
        return [f"{path} now holds another store (manifest {found[:12]}, expected {build.digest[:12]})"]
    return []


def verify_build(build: Candidate, on_bytes: OnProgress = ignore) -> list[str]:
    """Read every byte of a build's store, in files and database, and return the differences from its hashes.

    `on_bytes` is called after each file with the bytes read and the total.
    """
    problems = verify_present(build)
    if problems:
        return problems
    path = Path(build.path)
    manifest = load_manifest(path, build.kind)
    return verify_files(path, manifest, on_bytes) or _entry_problems(path, manifest)


def _entry_problems(path: Path, manifest: Manifest) -> list[str]:
    if not manifest.parameters.get("backends"):
        return []  # avoids importing the kind's kernels
    try:
        return kind_of(manifest.kind).verify_entries(path, manifest)
    except StoreError as error:
        return [str(error)]


def publish(
    transaction: Transaction,
    name: str,
    build_id: int,
    *,
    force: Collection[str] = (),
    verify: Verify = verify_build,
    measure: Measure = measure,
    removals: Removals | None = None,
) -> Moved:
    """Point a release, created if new, at a build; publishing the live build again changes nothing.

    Args:
        transaction: begins a transaction in the catalogue.
        name: name of the release.
        build_id: id of a finished build.
        force: names of checks to override (`schema.catalogue.gates.CHECKS`).
        verify: returns the problems of the store.
        measure: replays a recording.
        removals: finds removed documents; None: there are no collections.

    Raises:
        CatalogueError: the build cannot be published, or another process moved the release meanwhile.
        RefusedError: a check refuses the build; the catalogue records the reasons, too.
    """
    with transaction() as session:
        new = _candidate(get_build(session, build_id))
        release = session.scalars(select(Release).filter_by(name=name)).one_or_none()
        if release is None:
            require_name(name, "a release", CatalogueError)
        live = Candidate.of(release.build) if release else None
        rules = rules_of(session, name)
    if new.kind not in KINDS:
        raise CatalogueError(
            f"build {build_id} is of kind {new.kind!r}, which gives no drafts: publish a store instead"
        )
    if live and live.id == new.id:
        _require_whole(new, verify)
        with transaction() as session:
            return _move(session, name, new, live, "publish", PASSED)
    new = new._replace(replays=tuple(Replayed(rule) for rule in rules))
    _require_passed(transaction, name, new, live, force, removals)  # is fast, so before the store is read
    _require_whole(new, verify)
    if rules:
        both = [new, live] if live else [new]
        mine, *theirs = zip(*(measure(rule, both) for rule in rules), strict=True)
        new, live = new._replace(replays=mine), live and live._replace(replays=theirs[0])
        with transaction() as session:
            _record_replays(session, [new, live] if live else [new])
    verdict = _require_passed(transaction, name, new, live, force, removals)
    with transaction() as session:
        return _move(session, name, new, live, "publish", verdict)


def _require_passed(
    transaction: Transaction,
    name: str,
    new: Candidate,
    live: Candidate | None,
    force: Collection[str],
    removals: Removals | None,
    checks: Mapping[str, Check] = CHECKS,
) -> Verdict:
    """Return the verdict of the gates; if they refuse the build, the catalogue records the reasons."""
    with transaction() as session:
        if removals:
            removed, warning = removals(session, get_build(session, new.id))
            new = new._replace(removed=removed, warning=warning)
        verdict = judge(new, live, force, checks)
        if verdict.refused:
            _record(get_build(session, new.id, lock=True), name, verdict)
    if verdict.refused:
        raise RefusedError(name, verdict.refused, new, live)
    return verdict


def _record_replays(session: Session, builds: list[Candidate]) -> None:
    for build in builds:
        if session.get(Build, build.id, with_for_update={"key_share": True}) is None:
            continue
        for replay in build.replays:
            if replay.summary is not None:
                rule = replay.rule
                record_replay(
                    session, build.id, replay.summary, recordings=rule.path, strategy=replay.strategy,
                    budget=rule.budget, model=rule.model, recording=rule.name,
                )  # fmt: skip


def rollback(
    transaction: Transaction,
    name: str,
    *,
    force: Collection[str] = (),
    verify: Verify = verify_present,
    removals: Removals | None = None,
) -> Moved:
    """Point a release at the previous build; repeated calls go back through all published builds.

    A rollback undoes a publishing: after publishing 1, 2 and 3 it goes to 2, then to 1; after publishing 4 from there,
    back to 1. Builds dropped since are skipped. A large store takes no longer, because its bytes were verified when
    it was published. The only check is that for removed documents. For arguments and errors see `publish`.
    """
    with transaction() as session:
        release = get_release(session, name)
        live = Candidate.of(release.build)
        new = _candidate(get_build(session, build_before(session, release)))
    _require_whole(new, verify)
    verdict = _require_passed(transaction, name, new, live, force, removals, ROLLBACK_CHECKS)
    with transaction() as session:
        return _move(session, name, new, live, "rollback", verdict)


def _candidate(build: Build) -> Candidate:
    if build.state != "finished":
        why = f": {build.error}" if build.error else ""
        raise CatalogueError(f"build {build.id} is {build.state}{why}; only finished builds can be published")
    return Candidate.of(build)


def _require_whole(build: Candidate, verify: Verify) -> None:
    problems = verify(build)
    if problems:
        more = f" (and {counted(len(problems) - 1, 'more problem')})" if len(problems) > 1 else ""
        raise CatalogueError(f"build {build.id} does not verify: {problems[0]}{more}")


def _move(
    session: Session, name: str, new: Candidate, live: Candidate | None, action: str, verdict: Verdict
) -> Moved:
    """Point a release at a verified build and record the move; CatalogueError if either has changed meanwhile."""
    build = get_build(session, new.id, lock=True)  # cannot be dropped from here on
    if _candidate(build) != new._replace(replays=()):
        raise CatalogueError(f"build {new.id} has just been changed by another process: try again")
    before = live and live.id
    if before != new.id and (action == "publish" or any(verdict)):
        _record(build, name, verdict)
    made = insert(Release).values(name=name, build_id=new.id).on_conflict_do_nothing()
    is_new = live is None and session.scalars(made.returning(Release.name)).one_or_none() is not None
    release = get_release(session, name, lock=True)
    if not is_new:
        if release.build_id == new.id and action == "publish":
            return Moved(name, new, release.build_id, release.moved_at, verdict, live)
        if release.build_id != before:
            raise CatalogueError(
                f"the release {name} has just been moved by another process: see `draftstore releases list`, and try "
                "again"
            )
    measured = {replay.rule.name: replay.accepted_length for replay in new.replays if replay.summary}
    lengths = measured if action == "publish" else last_lengths(session, name, new.id)
    session.add(ReleaseMove(release=name, from_build=before, to_build=new.id, action=action, lengths=lengths))
    release.build_id, release.moved_at = new.id, func.now()
    session.flush()
    session.refresh(release)
    return Moved(name, new, before, release.moved_at, verdict, live)


def _record(build: Build, name: str, verdict: Verdict) -> None:
    """Record the verdict on a build, for `draftstore catalogue show`."""
    found = {how: reasons for how, reasons in verdict._asdict().items() if reasons}
    others = {release: old for release, old in (build.parameters.get(GATES) or {}).items() if release != name}
    gates = others | ({name: found} if found else {})
    rest = {key: value for key, value in build.parameters.items() if key != GATES}
    build.parameters = rest | ({GATES: gates} if gates else {})
