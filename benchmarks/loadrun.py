"""Running the load generator, and moving a release meanwhile."""

import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from sqlalchemy import Engine
from sqlalchemy.orm import Session, sessionmaker

from benchmarks.loadgen import Load
from schema import catalogue
from schema.database import make_engine
from schema.gates import CHECKS


class RunningLoad:
    """A load generator in a process of its own, that has connected."""

    def __init__(self, load: Load) -> None:
        """Start it.

        Raises:
            SystemExit: it cannot connect.
        """
        command = [sys.executable, "-m", "benchmarks.loadgen", json.dumps(dataclasses.asdict(load))]
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent.parent
        )
        assert self._process.stdout is not None
        self._output = self._process.stdout
        self.pid = self._process.pid
        if self._output.readline().strip() != "started":
            self._output.close()
            raise SystemExit(f"the load generator ended with status {self._process.wait()}")

    def stop(self) -> None:
        """Ask for an early end."""
        self._process.terminate()

    def result(self) -> dict[str, Any]:
        """Wait for the end and return the figures of `Generator.run`.

        Raises:
            SystemExit: it failed.
        """
        output = self._output.read()
        self._output.close()
        if self._process.wait() != 0:
            raise SystemExit(f"the load generator ended with status {self._process.returncode}")
        figures: dict[str, Any] = json.loads(output.splitlines()[-1])
        return figures


def run_load(load: Load) -> dict[str, Any]:
    """Run a load to its end and return the figures."""
    return RunningLoad(load).result()


class Mover:
    """Moves a release between builds in a real catalogue: publish, roll back, publish, ..."""

    def __init__(self, release: str, stores: Sequence[Path]) -> None:
        """Register the stores and publish the first of them; what was published under the name before is forgotten."""
        self.release = release
        self._engine: Engine = make_engine()
        self._moves = 0
        with Session(self._engine) as session, session.begin():
            if any(each.name == release for each in catalogue.list_releases(session)):
                catalogue.remove(session, release)
            self._builds = [catalogue.add_build(session, path).id for path in stores]
        self._transaction = sessionmaker(self._engine).begin
        catalogue.publish(self._transaction, release, self._builds[0])

    def move(self) -> dict[str, Any]:
        """Move the release; before it is published, every byte of the build is read and checked, as always."""
        forward = self._moves % 2 == 0
        self._moves += 1
        if forward:
            to = catalogue.publish(self._transaction, self.release, self._builds[1], force=CHECKS).build_id
        else:
            to = catalogue.rollback(self._transaction, self.release).build_id
        action = "publish" if forward else "rollback"
        return {"release": self.release, "action": action, "build": to, "at": time.monotonic()}

    def close(self) -> None:
        """Let go of the database."""
        self._engine.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()
