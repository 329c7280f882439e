"""The deployments of all flows: their schedules and parameters, and the runner of their runs.

Settings are the defaults, and over them what `flows.toml` sets. A run consists of its flow's function, as loaded by
this process, and parameters. Nothing else comes from the server: no command, environment, folder or entry point.
"""

import asyncio
import inspect
import json
import multiprocessing
import os
import signal
import threading
import tomllib
from pathlib import Path
from typing import Annotated, Any
from uuid import UUID
from zoneinfo import ZoneInfo

import click
import httpx
from prefect import Flow
from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.actions import DeploymentScheduleCreate, DeploymentUpdate
from prefect.client.schemas.filters import DeploymentFilter, FlowRunFilter
from prefect.client.schemas.objects import ConcurrencyLimitConfig, ConcurrencyLimitStrategy, FlowRun, State
from prefect.exceptions import ObjectNotFound
from prefect.runner import Runner
from prefect.schedules import Cron, Schedule
from prefect.states import Crashed
from pydantic import AfterValidator, Field, create_model

from draftstore.options import Options, OptionsError
from pipelines.flows import FLOWS
from pipelines.rebuild import rebuild
from schema.db.embedded import data_home

DEFAULTS: dict[str, dict[str, Any]] = {
    # All collections; for DReSD stores, name some under `collections`, and the model under `dense`.
    "rebuild": {"schedule": "45 2 * * *", "parameters": {"keep": 3}},
    "build-crest": {"parameters": {"release": "{name}", "keep": 7}},
    "build-dresd": {"parameters": {"release": "{name}-dresd"}},
}
URL_VARIABLE = "DRAFTSTORE_NOTIFY_URL"
"""A webhook that accepts `{"text": ...}`, such as those of Slack, Mattermost and Teams; unset: no notices."""
ONE_AT_A_TIME = ConcurrencyLimitConfig(limit=1, collision_strategy=ConcurrencyLimitStrategy.ENQUEUE)
COMMON: dict[str, Any] = {"concurrency_limit": ONE_AT_A_TIME, "tags": ["draftstore"]}
MORE = {"active", "parameters", "slug", "max_scheduled_runs"}
STOP_SECONDS = 10.0
"""Time for a run to end by itself."""
CUT_OFF = "this run was cut off: run it again, finished steps are kept"


class DeploymentSettings(Options):
    """The schedule of a deployment, and parameters that differ from its flow's defaults. Runs can override those."""

    schedule: Annotated[str, AfterValidator(lambda text: Cron(text).cron)] | None = None
    timezone: ZoneInfo = ZoneInfo("UTC")
    parameters: dict[str, Any] = Field({})

    @property
    def cron(self) -> Schedule | None:
        """The schedule in Prefect's terms."""
        return Cron(self.schedule, timezone=str(self.timezone)) if self.schedule else None


def read_settings(path: Path, flows: dict[str, Flow[..., Any]]) -> dict[str, DeploymentSettings]:
    """Return the settings of each flow's deployment, if all are valid; an error names the file and the key."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        return {name: _merged(name, flows.get(name), tables.get(name, {})) for name in flows | tables}
    except (OSError, ValueError) as error:
        raise OptionsError(("", f"{path}: {error}")) from None


def _merged(name: str, flow: Flow[..., Any] | None, table: Any) -> DeploymentSettings:
    if flow is None or not isinstance(table, dict):
        raise ValueError(f"{name}: is not the table of a deployment")
    key, default = name, DEFAULTS.get(name, {})
    try:
        settings = DeploymentSettings(**default | _with_none(table))
        key = f"{name}.parameters"
        parameters = default.get("parameters", {}) | _with_none(settings.parameters)
        required = ... if settings.schedule else None  # runs of other deployments may name them
        fields: dict[str, Any] = {
            each.name: (each.annotation, required if each.default is each.empty else each.default)
            for each in inspect.signature(flow.fn).parameters.values()
        }
        valid = create_model(name, __base__=Options, **fields)(**parameters)
        return settings.changed(parameters=valid.model_dump(mode="json", exclude_unset=True))
    except OptionsError as error:
        raise ValueError(error.spelled(f"{key}.{{}}".format)) from None


def _with_none(table: dict[str, Any]) -> dict[str, Any]:
    """Replace `false`: TOML has no null, and neither settings nor parameters are booleans."""
    return {key: None if value is False else value for key, value in table.items()}


def notify(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
    """Notify the webhook, if there is one, of a failed run."""
    if url := os.environ.get(URL_VARIABLE):
        text = f"draftstore: a run failed\n{flow.name} `{flow_run.name}`: {state.name}: {state.message}"
        try:  # no redirect is followed, no answer read
            with httpx.stream("POST", url, json={"text": text}, timeout=10) as answer:
                failed = "" if answer.is_success else f"it answered {answer.status_code}"
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
            failed = str(error)
        if failed:
            click.echo(f"the webhook of {URL_VARIABLE} failed: {failed}", err=True)


HOOKS: dict[str, Any] = {"on_failure": [notify], "on_crashed": [notify]}
DEPLOYED = {flow.name: flow.with_options(**HOOKS) for flow in (rebuild, *FLOWS)}


class FlowRunner(threading.Thread):
    """Serves all deployments, in a separate thread so that signals reach the main one."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        path = data_home() / "flows.toml"
        self._settings = read_settings(path, DEPLOYED)
        click.echo(f"schedules and parameters: {path}" + ("" if path.exists() else " (none: the defaults)"))
        self._loop = asyncio.new_event_loop()
        self._runner = Runner(query_seconds=1, limit=None, pause_on_shutdown=False)
        # Prefect's own, a folder of /tmp, belongs to the first account that ran flows on this machine.
        self._runner._tmp_dir = data_home() / "runner"

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
        async with get_client() as client:
            for name, flow in DEPLOYED.items():
                settings = self._settings[name]
                options = {"schedule": settings.cron, "parameters": settings.parameters, **COMMON}
                paused = await _reset(client, name, settings)
                deployment = await self._runner.aadd_flow(flow, "default", paused=paused, **options)
                # Else a run with a parameter that its flow does not have would start, and crash.
                schema = flow.parameters.model_dump(exclude_unset=True) | {"additionalProperties": False}
                await client.update_deployment(deployment, DeploymentUpdate(parameter_openapi_schema=schema))
                await _mark_cut_off(client, flow, deployment)
        await self._runner.start()


async def _reset(client: PrefectClient, name: str, settings: DeploymentSettings) -> bool:
    """Log what this start resets; return whether the deployment is paused, which holds, since no setting does that."""
    try:
        found = await client.read_deployment_by_name(f"{name}/default")
    except ObjectNotFound:
        return False
    wanted = [DeploymentScheduleCreate.from_schedule(settings.cron)] if settings.cron else []
    old, new = _shown(found.schedules, found.parameters), _shown(wanted, settings.parameters)
    for key in sorted(old.keys() | new.keys()):
        was, now = old.get(key, "its default"), new.get(key, "its default")
        if was != now:
            click.echo(f"{name}: {key} reset to {now}, from {was}")
    if old["schedule"] != new["schedule"]:
        for each in found.schedules:  # Prefect does not replace those that have a slug
            await client.delete_deployment_schedule(found.id, each.id)
    if found.paused:
        click.echo(f"{name}: paused in Prefect, and stays so")
    return found.paused


def _shown(schedules: list[Any], parameters: dict[str, Any]) -> dict[str, str]:
    dump: dict[str, Any] = {"mode": "json", "exclude_defaults": True}
    facts = [each.schedule.model_dump(**dump) | each.model_dump(include=MORE, **dump) for each in schedules]
    texts = sorted(", ".join(f"{name} {value}" for name, value in each.items()) for each in facts)
    values = {f"parameter {name}": json.dumps(value, sort_keys=True) for name, value in parameters.items()}
    return {"schedule": "; ".join(texts) or "none"} | values


async def _mark_cut_off(client: PrefectClient, flow: Flow[..., Any], deployment: UUID) -> None:
    """Mark the unfinished runs of a deployment as crashed: a server has one runner, and this one has started none."""
    ours = DeploymentFilter.model_validate({"id": {"any_": [deployment]}})
    at_work = FlowRunFilter.model_validate(
        {"state": {"type": {"any_": ["RUNNING", "PENDING", "CANCELLING"]}}}
    )
    for run in await client.read_flow_runs(deployment_filter=ours, flow_run_filter=at_work):
        state: State[Any] = Crashed(message=CUT_OFF)
        await client.set_flow_run_state(run.id, state, force=True)
        click.echo(f"the run {run.name} of {flow.name} was cut off: it is marked as crashed")
        notify(flow, run, state)
