import json
import logging
import re
import sys
from collections.abc import Iterator

import pytest

from services.common import logs
from services.common.logs import LogOptions

LOG = logging.getLogger("services.lookup.example")


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """Leave the logging of the test run as it was."""
    root = logging.getLogger()
    handlers, level, raising = root.handlers[:], root.level, logging.raiseExceptions
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.raiseExceptions = raising


def test_lines_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure(LogOptions())
    LOG.info("two %s", "words", extra={"pid": 7, "releases": ["a b"], "how": "exit status 0", "empty": ""})
    LOG.debug("not this")
    [line] = capsys.readouterr().err.splitlines()
    assert re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z info    two words ", line)
    assert line.endswith('two words pid=7 releases=["a b"] how="exit status 0" empty=""')


def test_lines_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure(LogOptions(log_format="json", log_level="warning"))
    LOG.warning("näme\nwith a break", extra={"seconds": 0.5, "path": sys})
    LOG.info("not this")
    logging.getLogger("asyncio").error("of a library")
    own, foreign = map(json.loads, capsys.readouterr().err.splitlines())
    assert (own["event"], own["level"], own["seconds"]) == ("näme\nwith a break", "warning", 0.5)
    assert own.keys() == {"time", "level", "event", "seconds", "path"}
    assert (foreign["event"], foreign["logger"]) == ("of a library", "asyncio")


def test_a_line_for_people_is_one_line_without_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure(LogOptions())
    LOG.error("first\nsecond\x1b[31m", extra={"path": "\x9b"})
    assert capsys.readouterr().err.rstrip("\n").endswith("first\\nsecond\\x1b[31m path=\\x9b")
