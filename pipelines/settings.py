"""Schedules and parameters of the deployments: the defaults, and over them what `flows.toml` sets."""

import inspect
import tomllib
from pathlib import Path
from typing import Annotated, Any
from zoneinfo import ZoneInfo

from prefect import Flow
from prefect.schedules import Cron, Schedule
from pydantic import AfterValidator, Field, create_model

from draftstore.options import Options, OptionsError

DEFAULTS: dict[str, dict[str, Any]] = {
    # All collections; for DReSD stores, name some under `collections`, and the model under `dense`.
    "rebuild": {"schedule": "45 2 * * *", "parameters": {"keep": 3}},
    "build-crest": {"parameters": {"release": "{name}", "keep": 7}},
    "build-dresd": {"parameters": {"release": "{name}-dresd"}},
}


class Settings(Options):
    """The schedule of a deployment, and parameters that differ from its flow's defaults. Runs can override those."""

    schedule: Annotated[str, AfterValidator(lambda text: Cron(text).cron)] | None = None
    timezone: ZoneInfo = ZoneInfo("UTC")
    parameters: dict[str, Any] = Field({})

    @property
    def cron(self) -> Schedule | None:
        """The schedule in Prefect's terms."""
        return Cron(self.schedule, timezone=str(self.timezone)) if self.schedule else None


def read_settings(path: Path, flows: dict[str, Flow[..., Any]]) -> dict[str, Settings]:
    """Return the settings of each flow's deployment, if all are valid; an error names the file and the key."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        return {name: _merged(name, flows.get(name), tables.get(name, {})) for name in flows | tables}
    except (OSError, ValueError) as error:
        raise OptionsError(("", f"{path}: {error}")) from None


def _merged(name: str, flow: Flow[..., Any] | None, table: Any) -> Settings:
    """Return the default settings of a deployment, with those of its table over them."""
    if flow is None or not isinstance(table, dict):
        raise ValueError(f"{name}: is not the table of a deployment")
    key, default = name, DEFAULTS.get(name, {})
    try:
        given = Settings(**default | _with_none(table))
        key = f"{name}.parameters"
        given_parameters = default.get("parameters", {}) | _with_none(given.parameters)
        required = ... if given.schedule else None  # runs of other deployments may name them
        fields: dict[str, Any] = {
            each.name: (each.annotation, required if each.default is each.empty else each.default)
            for each in inspect.signature(flow.fn).parameters.values()
        }
        valid = create_model(name, __base__=Options, **fields)(**given_parameters)
        return given.changed(parameters=valid.model_dump(mode="json", exclude_unset=True))
    except OptionsError as error:
        raise ValueError(error.spelled(f"{key}.{{}}".format)) from None


def _with_none(table: dict[str, Any]) -> dict[str, Any]:
    """Replace `false`: TOML has no null, and neither settings nor parameters are booleans."""
    return {key: None if value is False else value for key, value in table.items()}
