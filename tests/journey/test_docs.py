"""README and docs are run: every command line and Python example, on stores like the quickstart's."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from draftstore.stores.registry import open_store
from pipelines.rebuild import CrestRebuild
from schema.db.database import READER_VARIABLE, URL_VARIABLE
from schema.db.embedded import HOME_VARIABLE
from tests import ROOT
from tests.fakes.databases import new_database, reader_of
from tests.fakes.servers import free_port
from tests.journey.examples import BLOCKS, COMMANDS, DECODING, LOCAL, MODEL, READ, REMOTE, run
from tests.journey.pages import Page, read_page
from tests.process.test_flows import orchestrator

__all__ = ["orchestrator"]  # a fixture

SOURCES = (ROOT / "services", ROOT / "schema")
"""Enough for the answers to differ, and for a removal to take less than a fifth: 110,000 tokens."""
SECONDS = 300.0
"""How long a service may take to get ready where no kernel was compiled before."""
SERVED = {page.name: page for page in READ if page.services}
DRAFTING = {"README.md": "data/quickstart/store", "docs/service.md": "data/small"}
"""The store that is behind the release `code` of each page which starts the service."""


@pytest.fixture(scope="module", autouse=True)
def catalogue(
    database_server: str, template_database: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """Have the commands use a catalogue and a data folder of their own."""
    with new_database(database_server, template_database) as url, pytest.MonkeyPatch.context() as patch:
        patch.setenv(URL_VARIABLE, url)
        patch.setenv(READER_VARIABLE, reader_of(url))
        patch.setenv(HOME_VARIABLE, str(tmp_path_factory.mktemp("home")))
        yield url


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the quickstart in an empty folder, on some source of this project, in a process of its own."""
    folder = tmp_path_factory.mktemp("docs")
    arguments = ["quickstart", "--out", "data/quickstart", "--held-out", "10"]
    for source in SOURCES:
        arguments += ["--source", str(source)]
    command = [sys.executable, "-m", "draftstore", *arguments]
    subprocess.run(command, cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True)
    return folder


def test_pages_name_commands() -> None:
    assert len(READ[0].commands) >= 2
    assert len(COMMANDS) >= 6
    assert SERVED.keys() == REMOTE.keys() == DRAFTING.keys()
    assert len(BLOCKS) == len(REMOTE) + len(DECODING) + len(LOCAL), "a page has two examples of one kind"


@pytest.fixture(scope="module")
def answers(checkout: Path) -> dict[str, str]:
    """Run every command of the pages, in order, and return what each prints."""
    commands = [command for command in COMMANDS if not command.endswith("&") and MODEL not in command]
    return {command: run(shlex.split(command), checkout) for command in commands}


@pytest.mark.slow
def test_every_command_of_the_pages_runs(answers: dict[str, str]) -> None:
    for command, printed in answers.items():
        assert printed, f"draftstore {command} printed nothing"
        if command.startswith("sql "):
            assert re.search(r"^(│|\n)", printed, re.MULTILINE), f"{command} yields no rows"


@pytest.mark.slow
@pytest.mark.parametrize("page", list(LOCAL))
def test_the_python_examples_run(page: str, checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(checkout)
    names: dict[str, Any] = {}
    exec(LOCAL[page], names)
    assert names["mask"].shape == (len(names["positions"]),) * 2


@pytest.fixture(params=list(SERVED.values()), ids=list(SERVED))
def service(
    request: pytest.FixtureRequest,
    answers: dict[str, str],  # a release that they publish is served
    checkout: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[tuple[Page, str]]:
    """Start the lookup service as a page does, on a port and a socket of its own; yield the page and the address."""
    page: Page = request.param
    (command,) = page.services
    address = f"127.0.0.1:{free_port()}"
    monkeypatch.setenv("DRAFTSTORE_SOCKET", str(tmp_path / "lookup.sock"))
    arguments = [*shlex.split(command), "--http", address]
    with subprocess.Popen([sys.executable, "-m", "draftstore", *arguments], cwd=checkout) as process:
        try:
            wait_until_ready(f"http://{address}/readyz", process)
            yield page, address
        finally:
            process.terminate()
    assert process.returncode == 0


def wait_until_ready(url: str, process: "subprocess.Popen[bytes]") -> None:
    end = time.monotonic() + SECONDS
    while process.poll() is None and time.monotonic() < end:
        with suppress(OSError), urllib.request.urlopen(url, timeout=5) as answer:
            if answer.status == 200:
                return
        time.sleep(0.1)
    pytest.fail(f"{url} does not get ready")


@pytest.mark.slow
def test_the_service_answers_as_the_pages_say(
    service: tuple[Page, str], checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page, address = service
    assert page.requests
    for request in page.requests if shutil.which("curl") else []:
        command = shlex.split(request.replace("127.0.0.1:7780", address))
        printed = subprocess.run([*command, "--fail", "--silent"], capture_output=True, check=True).stdout
        assert printed, request
    monkeypatch.chdir(checkout)
    names: dict[str, Any] = {}
    # Whether 2 ms are enough on a busy machine is not what is tested here.
    exec(REMOTE[page.name].replace("RemoteStore(name", "RemoteStore(deadline=60, name"), names)
    local = (
        open_store(checkout / DRAFTING[page.name])
        .drafter()
        .session(names["tokenizer"].encode("import os\nfor i in range(", bos=True))
    )
    assert names["tree"] == local.propose(budget=64)
    assert names["store"].counters["answered"] == names["store"].counters.calls == 1


@pytest.mark.slow
def test_the_pages_in_order_end_in_a_proof(
    answers: dict[str, str],
    checkout: Path,
    orchestrator: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from pipelines.rebuild import rebuild  # after the orchestrator

    blocks = read_page("docs/corpora.md").shell
    (first,) = (number for number, block in enumerate(blocks) if """collections='["python"]'""" in block)
    begun, *commands = "".join(blocks[first : first + 2]).splitlines()
    assert begun.startswith("prefect deployment run rebuild/default")
    assert commands[-1] == "draftstore corpus prove-removed python"
    monkeypatch.chdir(checkout)
    rebuild(collections=["python"], distilling=CrestRebuild(ngrams=20_000))
    (tmp_path / "draftstore").write_text(f'#!/bin/sh\nexec {sys.executable} -m draftstore "$@"\n')
    (tmp_path / "draftstore").chmod(0o755)
    found = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    for command in commands:
        subprocess.run(command, shell=True, env=os.environ | found, check=True)
