"""Flow runs on a Prefect of the benchmark's own, as `make prefect` starts it: asked for one at a time, or scheduled."""

import base64
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from benchmarks.keeping import TROUBLE, Kept, ask
from benchmarks.service import free_port
from pipelines.secret import AUTH_FILE

ENDS = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")
WELCOME = "Ctrl-C stops everything"
ROLES = {"prefect.engine": "flow", "server": "prefect server", "worker": "prefect worker"}
"""Roles of Prefect's programs by an argument."""
UP_SECONDS = 300.0
FEW_SECONDS = 5.0
STUCK_SECONDS = 600.0


class Run(NamedTuple):
    """A flow run that has ended, or that nothing was heard of for long; times of the monotonic clock."""

    state: str
    message: str
    begin: float
    end: float


class Flows:
    """Prefect's server and worker, and the runs that they are asked for.

    Attributes:
        kept: the command.
        runs: those that have ended.
    """

    def __init__(self, work: Path, deployment: str, environment: Mapping[str, str] | None = None) -> None:
        """Start Prefect.

        Args:
            work: folder of its state and log.
            deployment: whose runs these are.
            environment: of the flow runs, besides that of this process.
        """
        self._deployment = deployment
        self._state, self._log, port = work / "prefect", work / "prefect.log", free_port()
        self._log.write_text("")
        self._url = f"http://127.0.0.1:{port}/api"
        self.kept = Kept(
            "prefect",
            ("pipelines.local", "up", "--port", port, "--state", self._state),
            self._log,
            environment,
        )
        self.runs: list[Run] = []
        self._current = ""
        self._begin = 0.0

    def wait_until_up(self) -> None:
        """Wait until it takes runs."""
        self.kept.wait_for(lambda: WELCOME in self._log.read_text(errors="replace"), UP_SECONDS)

    @property
    def idle(self) -> bool:
        """Whether no run is under way."""
        return not self._current

    def start(self, parameters: Mapping[str, Any]) -> bool:
        """Ask for a run; return whether the server has taken it."""
        try:
            deployment = self._ask(f"deployments/name/{self._deployment}")
            made = self._ask(f"deployments/{deployment['id']}/create_flow_run", {"parameters": parameters})
            self._current = made["id"]
        except (*TROUBLE, LookupError, TypeError):
            return False
        self._begin = time.monotonic()
        return True

    def look(self) -> Run | None:
        """Return the present run if it has ended since."""
        if self.idle:
            return None
        now = time.monotonic()
        try:
            found = self._ask(f"flow_runs/{self._current}")
            state, said = found["state_type"], found["state"]["message"] or ""
        except (*TROUBLE, LookupError, TypeError):
            return None
        if state not in ENDS:
            if now - self._begin < STUCK_SECONDS:
                return None
            state = f"STUCK in {state}"
        self._current = ""
        self.runs.append(Run(state, " ".join(said.split())[:300], self._begin, now))
        return self.runs[-1]

    def run(self, parameters: Mapping[str, Any]) -> Run:
        """Ask for a run and wait for its end."""
        while not self.start(parameters):
            self.kept.revive()
            time.sleep(0.5)
        while (run := self.look()) is None:
            self.kept.revive()
            time.sleep(0.5)
        return run

    def schedule(self, seconds: float, parameters: Mapping[str, Any]) -> None:
        """Have runs start by themselves, so often; does nothing where they do already.

        Raises:
            OSError: the server does not answer.
        """
        found = self._ask(f"deployments/name/{self._deployment}")
        if not any("interval" in each["schedule"] for each in found["schedules"]):
            asked = [{"schedule": {"interval": seconds}, "parameters": parameters}]
            self._ask(f"deployments/{found['id']}/schedules", asked)

    def count(self, state: str, since: datetime) -> int:
        """Return how many runs that began after a moment have a state.

        Raises:
            OSError: the server does not answer.
        """
        chosen = {"state": {"type": {"any_": [state]}}, "start_time": {"after_": since.isoformat()}}
        return int(self._ask("flow_runs/count", {"flow_runs": chosen}))

    def processes(self) -> dict[int, str]:
        """Return the roles of Prefect's processes by process id."""
        found = {}
        for process in self.kept.family():
            with suppress(psutil.Error):  # it has ended
                words = process.cmdline()
                role = next((role for word, role in ROLES.items() if word in words), "")
                if process.pid == self.kept.process.pid:
                    found[process.pid] = "prefect supervisor"
                elif role and role not in found.values():  # the first of a role: others are its children
                    found[process.pid] = role
        return found

    def _ask(self, path: str, body: object = None) -> Any:
        secret = (self._state / AUTH_FILE).read_text(encoding="utf-8").strip()
        authorization = f"Basic {base64.b64encode(secret.encode()).decode()}"
        status, found = ask(
            f"{self._url}/{path}", body, seconds=FEW_SECONDS, headers={"Authorization": authorization}
        )
        if status not in (200, 201):
            raise ConnectionError(f"{path}: {status}")
        return found
