"""The deployments of all flows, and the runner of their runs.

A run consists of its flow's function, as loaded by this process, and parameters. Nothing else comes from the server: no
command, environment, folder or entry point.
"""

import asyncio
import json
import multiprocessing
import os
import signal
import threading
import urllib.request
from typing import Any
from uuid import UUID

import click
from prefect import Flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import DeploymentFilter, FlowRunFilter
from prefect.client.schemas.objects import ConcurrencyLimitConfig, ConcurrencyLimitStrategy, FlowRun, State
from prefect.runner import Runner
from prefect.schedules import Cron
from prefect.states import Crashed

from draftstore.processes import end_with_parent
from pipelines.flows import FLOWS
from pipelines.renewal import rebuild
from pipelines.serving import STOP_SECONDS

URL_VARIABLE = "DRAFTSTORE_NOTIFY_URL"
"""A webhook that accepts `{"text": ...}`, such as those of Slack, Mattermost and Teams; unset: no notices."""
JSON = {"Content-Type": "application/json"}
ONE_AT_A_TIME = ConcurrencyLimitConfig(limit=1, collision_strategy=ConcurrencyLimitStrategy.ENQUEUE)
CUT_OFF = "this run was cut off: run it again, finished steps are kept"

SETTINGS: dict[str, dict[str, Any]] = {
    # Brings the stores of all collections up to date; to include DReSD stores, name collections under `collections`
    # and the model under `dense`.
    "rebuild": {"parameters": {"keep": 3}, "schedule": Cron("45 2 * * *", timezone="UTC")},
    # Activate it to run every night, once your own `name` and `corpus` are among the parameters.
    "build-crest": {
        "parameters": {"release": "{name}", "keep": 7},
        "schedule": Cron("15 2 * * *", timezone="UTC", active=False),
    },
    "build-dresd": {"parameters": {"release": "{name}-dresd"}},
}
"""Schedules of deployments, and parameters that differ from the flows' defaults. Runs can override parameters."""


def notify(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
    """Notify the webhook, if there is one, of a failed run."""
    if url := os.environ.get(URL_VARIABLE):
        text = f"draftstore: a run failed\n{flow.name} `{flow_run.name}`: {state.name}: {state.message}"
        body = json.dumps({"text": text}).encode()
        try:
            urllib.request.urlopen(urllib.request.Request(url, body, JSON), timeout=10).close()  # noqa: S310
        except OSError as error:
            click.echo(f"the webhook of {URL_VARIABLE} failed: {error}", err=True)


def end_with_runner(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:  # noqa: ARG001 - a hook
    """Make the process of this run end with that of its runner."""
    end_with_parent()


class FlowRunner(threading.Thread):
    """Serves all deployments, in a separate thread so that signals reach the main one."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._loop = asyncio.new_event_loop()
        self._runner = Runner(query_seconds=1, limit=None, pause_on_shutdown=False)

    def run(self) -> None:
        """Serve until `stop`."""
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # also in runs: `stop` ends those
        self._loop.run_until_complete(self._serve())

    def is_ready(self) -> bool:
        """Return True once runs can start."""
        return self._runner.started

    def stop(self) -> None:
        """Cancel all runs and wait for their end."""
        if self._runner.started:
            asyncio.run_coroutine_threadsafe(self._runner.astop(), self._loop).result()
        # Those that could not be cancelled because the server is gone.
        for run in multiprocessing.active_children():
            run.terminate()
            run.join(STOP_SECONDS)
            run.kill()
        self.join(STOP_SECONDS)

    async def _serve(self) -> None:
        for name, flow in {"rebuild": rebuild, **FLOWS}.items():
            hooked = flow.with_options(on_running=[end_with_runner], on_failure=[notify], on_crashed=[notify])
            deployment = await self._runner.aadd_flow(
                hooked,
                "default",
                concurrency_limit=ONE_AT_A_TIME,
                tags=["draftstore"],
                **SETTINGS.get(name, {}),
            )
            await _mark_cut_off(flow, deployment)
        await self._runner.start()


async def _mark_cut_off(flow: Flow[..., Any], deployment: UUID) -> None:
    """Mark the unfinished runs of a deployment as crashed: a server has one runner, and this one has started none."""
    ours = DeploymentFilter.model_validate({"id": {"any_": [deployment]}})
    at_work = FlowRunFilter.model_validate(
        {"state": {"type": {"any_": ["RUNNING", "PENDING", "CANCELLING"]}}}
    )
    async with get_client() as client:
        for run in await client.read_flow_runs(deployment_filter=ours, flow_run_filter=at_work):
            state: State[Any] = Crashed(message=CUT_OFF)
            await client.set_flow_run_state(run.id, state, force=True)
            click.echo(f"the run {run.name} of {flow.name} was cut off: it is marked as crashed")
            notify(flow, run, state)
