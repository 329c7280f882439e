"""The log of the service: one line per event on standard error, as text or JSON.

    LOG = logging.getLogger(__name__)
    LOG.info("worker ready", extra={"pid": 4711, "releases": ["chat"]})

    2026-01-01T12:00:00.123Z info    worker ready pid=4711 releases=["chat"]
    {"time": "2026-01-01T12:00:00.123Z", "level": "info", "event": "worker ready", "pid": 4711, "releases": ["chat"]}

A line is written with a single call, so that lines of several processes do not interleave.
"""

import json
import logging
import re
import sys
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from pydantic import Field

from draftstore.options import EXPERT, Options

_LIBRARIES = (
    "uvicorn", "uvicorn.error", "uvicorn.access", "asyncio", "psycopg", "psycopg.pool", "numba", "alembic",
)  # fmt: skip
LOADING_KERNELS = "loading kernels; the first start after an install compiles them, for a minute or two"
_USUAL = frozenset([*vars(logging.makeLogRecord({})), "message", "asctime", "taskName", "color_message"])


class LogOptions(Options):
    """What a service logs."""

    log_format: Annotated[Literal["text", "json"], EXPERT] = Field(
        "text", description="Human-readable lines, or JSON documents."
    )
    log_level: Annotated[Literal["debug", "info", "warning", "error"], EXPERT] = Field(
        "info", description="Minimum level that is logged."
    )


def configure(options: LogOptions) -> None:
    """Send everything that this process logs to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if options.log_format == "json" else _Text())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(options.log_level.upper())
    logging.raiseExceptions = False  # standard error may be closed: that must not stop the service
    for name in _LIBRARIES:
        logging.getLogger(name).setLevel(logging.WARNING)


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        """Return a line, followed by the traceback if there is one."""
        event, fields = _parts(record)
        words = [_time(record), f"{record.levelname.lower():7}", event]
        words += [f"{name}={_word(value)}" for name, value in fields.items()]
        line = re.sub(r"[\x00-\x1f\x7f-\x9f]", lambda found: repr(found[0])[1:-1], " ".join(words))
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        """Return one JSON document on one line."""
        event, fields = _parts(record)
        document = {"time": _time(record), "level": record.levelname.lower(), "event": event, **fields}
        if record.exc_info:
            document["traceback"] = self.formatException(record.exc_info)
        return json.dumps(document, ensure_ascii=False, default=str)


def _parts(record: logging.LogRecord) -> tuple[str, dict[str, Any]]:
    fields = {name: value for name, value in vars(record).items() if name not in _USUAL}
    if record.name.partition(".")[0] not in ("services", "draftstore", "schema"):
        fields["logger"] = record.name
    return record.getMessage(), fields


def _time(record: logging.LogRecord) -> str:
    when = datetime.fromtimestamp(record.created, UTC)
    return when.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _word(value: Any) -> str:
    """Return a value as one word; text without spaces stays as it is."""
    text = str(value) if isinstance(value, str | int | float) else ""
    return (
        text
        if text and not set(text) & set(" \t\n\"'=")
        else json.dumps(value, ensure_ascii=False, default=str)
    )
