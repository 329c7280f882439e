"""The builds of flow runs: their rows in the catalogue, their steps in the log.

A build has one row: running, then finished or failed, never left running. It is created before the work and finished
after all of it, including database tables. A retried step continues its row. If the run fails, so do its open rows; if
it is killed, the next run marks them as failed.
"""

import dataclasses
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from time import monotonic, sleep
from typing import Any, NamedTuple, TypeVar

from sqlalchemy import Engine
from sqlalchemy.orm import Session

from draftstore.errors import BuildRunningError, DraftstoreError, StoreError
from draftstore.storage.manifest import Manifest, load_manifest
from schema.catalogue.builds import (
    CatalogueError,
    fail_build,
    fail_cut_off,
    find_build,
    finish_build,
    start_build,
)
from schema.db.database import make_engine

POLL_SECONDS = 5.0
LOG_SECONDS = 5.0
"""Seconds between two lines about one step."""
Logger = logging.Logger | logging.LoggerAdapter[Any]
T = TypeVar("T")


class StepLog:
    """Logs the progress of a step, and always the end of a step of known size; reports to `on_report`."""

    def __init__(
        self, logger: Logger, step: str, unit: str, on_report: Callable[[str], None] = lambda _: None
    ) -> None:
        self._logger, self._step, self._unit, self._on_report = logger, step, unit, on_report
        self._begin: tuple[float, int] | None = None
        self._last = monotonic()

    def __call__(self, done: int, total: int | None, detail: str = "") -> None:
        """See `draftstore.storage.report.OnProgress`."""
        self._on_report(self._step)
        now = monotonic()
        begin, before = self._begin = self._begin or (now, done)
        if now - self._last < LOG_SECONDS and (total is None or done < total):
            return
        self._last = now
        share = f" of {total:,} {self._unit} ({done / total:.0%})" if total else f" {self._unit}"
        speed = (
            f"{(done - before) / (now - begin):,.0f} {self._unit}/s" if done > before and now > begin else ""
        )
        text = ", ".join(filter(None, (detail, f"{done:,}{share}", speed)))
        self._logger.info("%s: %s", self._step, text)


class StepLogs:
    """The steps of one build and the seconds of each: the time up to a report belongs to the step that reports."""

    def __init__(self, logger: Logger) -> None:
        self.timings: dict[str, float] = {}
        self._steps: dict[str, StepLog] = {}
        self._logger, self._last = logger, monotonic()

    @contextmanager
    def working(self) -> Iterator[None]:
        """Measure the work in the block; may be entered again on a retry."""
        self._last = monotonic()
        try:
            yield
        finally:
            self._spend("other")

    def step(self, name: str, unit: str) -> StepLog:
        """Return the log of a step; the same object for the same name."""
        return self._steps.setdefault(name, StepLog(self._logger, name, unit, self._spend))

    def _spend(self, name: str) -> None:
        now = monotonic()
        self.timings[name] = round(self.timings.get(name, 0.0) + now - self._last, 6)
        self._last = now


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


@dataclasses.dataclass(frozen=True)
class Built:
    """A store that a flow made, with the seconds it took, or found."""

    build_id: int
    path: Path
    manifest: Manifest
    reused: bool
    seconds: float = 0.0

    def summary(self) -> dict[str, Any]:
        """Return a summary as JSON values."""
        return {
            "build": self.build_id,
            "kind": self.manifest.kind,
            "path": str(self.path),
            "entries": self.manifest.counts["entries"],
            "tokens": self.manifest.counts["tokens"],
            "bytes": self.manifest.size,
            "seconds": round(self.seconds, 2),
            "reused": self.reused,
        }


def when_free(
    make: Callable[[], T], path: Path, logger: Logger, made: Callable[[], T | None] = lambda: None
) -> T:
    """Make something at `path`, or find what another run that was building there has `made` meanwhile.

    There is no time limit: the lock of the other run ends with its process, in whatever way that ends.
    """
    waiting = False
    while True:
        try:
            return make()
        except BuildRunningError:
            if not waiting:
                logger.info("another run is building %s: waiting until it has ended", path)
                waiting = True
        sleep(POLL_SECONDS)
        if (found := made()) is not None:
            return found


class Ledger(AbstractContextManager["Ledger"]):
    """The builds of one flow run: a context manager around all of its steps."""

    def __init__(self, logger: Logger | None = None) -> None:
        """Start without builds; the first step connects to the database, so that its failure can be retried."""
        self.logger = logger or logging.getLogger(__name__)
        self._open: dict[Path, tuple[int, StepLogs]] = {}
        self._engine: Engine | None = None

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        for path, (build_id, logs) in self._open.items():
            try:
                with self.session() as session:
                    fail_build(session, build_id, _reason(error), timings=logs.timings)
            except DraftstoreError as failure:
                self.logger.warning("the failure of %s is not in the catalogue yet: %s", path, failure)
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
        if found := self._finished(request.path):
            self.logger.info("build %d in %s is finished: nothing to do", found.build_id, request.path)
            return found
        build_id, logs = self._open.get(request.path) or self._begin(request)

        def attempt() -> None:
            with logs.working():
                make(build_id, logs)

        if found := when_free(attempt, request.path, self.logger, lambda: self._finished(request.path)):
            return found
        try:
            with self.session() as session:
                finish_build(session, build_id, timings=logs.timings)
        except CatalogueError:  # another run may have registered it first
            if found := self._finished(request.path):
                return found
            raise
        del self._open[request.path]
        manifest, seconds = load_manifest(request.path, request.kind), sum(logs.timings.values())
        self.logger.info("build %d finished: %s bytes in %.1f s", build_id, f"{manifest.size:,}", seconds)
        return Built(build_id, request.path, manifest, reused=False, seconds=seconds)

    def _begin(self, request: Request) -> tuple[int, StepLogs]:
        """Create a row for a build, after marking those of dead processes as failed."""
        with self.session() as session:
            for cut_off in fail_cut_off(session):
                self.logger.info("build %d was cut off: marked as failed", cut_off)
            build = start_build(session, **request._asdict())
            row = self._open[request.path] = build.id, StepLogs(self.logger)
        self.logger.info("build %d starts: %s in %s", row[0], request.kind, request.path)
        return row

    def _finished(self, path: Path) -> Built | None:
        """Return the store at a path if it is complete and fully registered; settle this run's own row for it."""
        try:
            manifest = load_manifest(path)
            with self.session() as session:
                build = find_build(session, path)
                if build.state != "finished" or Path(build.path) != path.resolve():
                    return None
                if path in self._open and self._open[path][0] != build.id:
                    fail_build(session, self._open[path][0], f"another run registered it as build {build.id}")
                found = build.id
        except (StoreError, CatalogueError):
            return None
        own = self._open.pop(path, None)  # finished by an attempt that was cut off before its confirmation
        return Built(found, path, manifest, reused=own is None or own[0] != found)


def _reason(error: BaseException | None) -> str:
    if isinstance(error, DraftstoreError | OSError):
        return " ".join(str(error).split())
    if isinstance(error, Exception):
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    return "ended by a signal: run it again, finished steps are kept"
