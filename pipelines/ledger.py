"""Records of flow runs in the catalogue: one row per build, running, then finished or failed, never left running.

A row is created before the work and finished after all of it, including database tables. A retried step continues with
its row. If the run fails, so do its open rows; if it is killed, the next run marks them as failed.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from sqlalchemy import Engine
from sqlalchemy.orm import Session

from draftstore.errors import DraftstoreError, StoreError
from draftstore.storage.manifest import load_manifest
from pipelines.progress import Logger, StepLogs
from pipelines.reports import Built
from pipelines.waiting import when_free
from schema.catalogue import (
    CatalogueError,
    fail_build,
    fail_cut_off,
    find_build,
    finish_build,
    start_build,
)
from schema.database import make_engine
from schema.holds import let_go

Make = Callable[[int, StepLogs], object]
"""Builds a store and its database tables, given the id of its row."""


class Request(NamedTuple):
    """A build that a step requests, for the catalogue: `parameters` are JSON values, `path` is from `store_path`."""

    kind: str
    name: str
    path: Path
    parameters: dict[str, Any]
    source_id: int | None = None
    backends: tuple[str, ...] = ()


class _Open(NamedTuple):
    """An unfinished row: its id, and the timings of its steps."""

    build_id: int
    logs: StepLogs


class Ledger:
    """The builds of one flow run: a context manager around all of its steps."""

    def __init__(self, logger: Logger | None = None) -> None:
        """Start without builds; the first step connects to the database, so that a failure can be retried."""
        self.logger = logger or logging.getLogger(__name__)
        self._open: dict[Path, _Open] = {}
        self._engine: Engine | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        for path, row in self._open.items():
            try:
                with self.session() as session:
                    fail_build(session, row.build_id, _reason(error), timings=row.logs.timings())
            except DraftstoreError as failure:
                self.logger.warning("the failure of %s is not in the catalogue yet: %s", path, failure)
                if self._engine is not None:
                    let_go(self._engine, row.build_id)  # so that the next run marks it
        self._open.clear()
        if self._engine is not None:
            self._engine.dispose()

    @contextmanager
    def session(self) -> Iterator[Session]:
        """Run a transaction in the catalogue: committed at the end of the block, rolled back on an exception."""
        if self._engine is None:
            self._engine = make_engine()
        with Session(self._engine) as session, session.begin():
            yield session

    def build(self, request: Request, make: Make) -> Built:
        """Find a registered store, or make it and register it, once no other run is building it.

        `make` makes or finds the store at its path and fills its tables; it resumes when called again.
        """
        found = self._finished(request.path)
        if found is not None:
            self.logger.info("build %d in %s is finished: nothing to do", found.build_id, request.path)
            return found
        row = self._open.get(request.path) or self._begin(request)

        def attempt() -> None:
            with row.logs.working():
                make(row.build_id, row.logs)

        found = when_free(attempt, request.path, self.logger, lambda: self._finished(request.path))
        if found is not None:
            return found
        timings = row.logs.timings()
        try:
            with self.session() as session:
                finish_build(session, row.build_id, timings=timings)
        except CatalogueError:
            found = self._finished(request.path)  # another run may have registered it first
            if found is None:
                raise
            return found
        del self._open[request.path]
        manifest = load_manifest(request.path, request.kind)
        self.logger.info(
            "build %d finished: %s bytes in %.1f s",
            row.build_id,
            f"{manifest.size:,}",
            sum(timings.values()),
        )
        return Built(row.build_id, request.path, manifest, reused=False, timings=timings)

    def _begin(self, request: Request) -> _Open:
        """Create a row for a build, after marking those of dead processes as failed."""
        with self.session() as session:
            for cut_off in fail_cut_off(session):
                self.logger.info("build %d was cut off: marked as failed", cut_off)
            build_id = start_build(
                session,
                request.kind,
                request.name,
                request.path,
                parameters=request.parameters,
                source_id=request.source_id,
                backends=request.backends,
            ).id
        self.logger.info("build %d starts: %s in %s", build_id, request.kind, request.path)
        row = self._open[request.path] = _Open(build_id, StepLogs(self.logger))
        return row

    def _finished(self, path: Path) -> Built | None:
        """Return the store at a path if it is complete and fully registered; settle this run's own row for it."""
        try:
            manifest = load_manifest(path)
            with self.session() as session:
                build = find_build(session, path)
                if build.state != "finished" or Path(build.path) != path.resolve():
                    return None
                build_id, timings = build.id, dict(build.timings)
                own = self._open.get(
                    path
                )  # of an attempt that succeeded without knowing it, or another run came first
                if own and own.build_id != build_id:
                    fail_build(
                        session, own.build_id, f"another run registered this store as build {build_id}"
                    )
        except (StoreError, CatalogueError):
            return None
        self._open.pop(path, None)
        mine = own is not None and own.build_id == build_id
        return Built(build_id, path, manifest, reused=not mine, timings=timings if mine else {})


def _reason(error: BaseException | None) -> str:
    """Return the reason why a build failed, for the catalogue."""
    if isinstance(error, DraftstoreError | OSError):
        return " ".join(str(error).split())
    if isinstance(error, Exception):
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    return "ended by a signal: run it again, finished steps are kept"
