"""The tutorials run as they stand: the shell commands of a page in one shell, its Python in one interpreter."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from draftstore.stores.registry import open_store
from schema.db.database import READER_VARIABLE, URL_VARIABLE
from schema.db.embedded import HOME_VARIABLE
from tests import ROOT
from tests.conftest import small_tokenizer_folder
from tests.fakes.databases import new_database, reader_of
from tests.fakes.servers import free_port
from tests.journey.pages import read_page
from tests.process.test_deployments import Local

SECONDS = 600.0
"""How long a page may take where no kernel was compiled before."""
NO_CURL = pytest.mark.skipif(not shutil.which("curl"), reason="needs curl")
FETCHING = "pip download"
"""How the block begins that fetches a model; here, a smaller one is in its place."""
PROGRAMS = {
    "draftstore": f'exec {sys.executable} -m draftstore "$@"',
    "prefect": f'exec {sys.executable} -m prefect "$@"',
    "python": f'exec {sys.executable} "$@"',
    "pip": "exit 0",
    "make": "exit 0",
    "vllm": 'printf "%s\\n" "$DRAFTSTORE_STORES" "$@" > vllm.txt',
}
"""The commands of the pages, of this interpreter; those that install nothing, and one that only notes its options."""


def shell_of(name: str) -> list[str]:
    """Return the blocks of shell commands of a tutorial, without the one that fetches a model."""
    found = read_page(f"docs/tutorials/{name}.md").shell
    fetching = [block for block in found if block.startswith(FETCHING)]
    assert fetching == [block for block in read_page("docs/decoding.md").shell if block.startswith(FETCHING)]
    return [block for block in found if block not in fetching]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder that a reader is in, with the commands of the pages on the path."""
    (tmp_path / "bin").mkdir()
    for name, does in PROGRAMS.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("DRAFTSTORE_SOCKET", str(tmp_path / "lookup.sock"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "reader" / "data").mkdir(parents=True)
    return tmp_path / "reader"


def paste(folder: Path, script: str) -> str:
    """Run commands in a shell until one fails, end what it left in the background, and return what it printed."""
    with (folder / "out.txt").open("wb") as out, (folder / "err.txt").open("wb") as err:
        shell = subprocess.Popen(
            ["bash", "-e", "-c", script], cwd=folder, stdout=out, stderr=err, start_new_session=True
        )
        try:
            status = shell.wait(timeout=SECONDS)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(shell.pid, signal.SIGTERM)
    assert status == 0, (folder / "err.txt").read_text(errors="replace")[-3000:]
    return (folder / "out.txt").read_text()


def test_from_your_logs_to_vllm(folder: Path) -> None:
    log, *rest = shell_of("logs")
    paste(folder, log)
    lines = (folder / "data" / "log.jsonl").read_text().splitlines()
    assert len(lines) > 2_000
    few = lines[:: len(lines) // 8]
    (folder / "data" / "log.jsonl").write_text("\n".join(few))
    small_tokenizer_folder(folder / "data" / "model")
    printed = paste(folder, "\n".join(rest))
    page, found = (
        re.findall(r"^│ (request.*?) +│ chain of 8 ", text, re.MULTILINE)
        for text in (read_page("docs/tutorials/logs.md").text, printed)
    )
    assert page == found
    assert len(page) == 4
    stores, _serve, _model, option, value = (folder / "vllm.txt").read_text().splitlines()
    assert open_store(folder / stores).manifest.counts["documents"] == len(few)
    assert option == "--speculative-config"
    assert value in read_page("docs/vllm.md").text


@pytest.fixture
def flows(
    folder: Path, database_server: str, template_database: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Local]:
    """Serve the flows as `make prefect` does, with a catalogue and a data folder of their own."""
    with new_database(database_server, template_database) as url:
        monkeypatch.setenv(URL_VARIABLE, url)
        monkeypatch.setenv(READER_VARIABLE, reader_of(url))
        monkeypatch.setenv(HOME_VARIABLE, str(folder / "home"))
        local = Local(folder / "data")
        try:
            yield local
        finally:
            local.stop()


@NO_CURL
@pytest.mark.slow
def test_from_a_collection_to_a_proven_removal(folder: Path, flows: Local) -> None:
    small_tokenizer_folder(folder / "data" / "model")
    blocks = [block for block in shell_of("night") if not block.startswith("make prefect")]
    port = free_port()
    script = "\n".join(blocks).replace(":4200/", f":{flows.port}/").replace(":7780/", f":{port}/")
    script = script.replace(
        "draftstore serve", f"draftstore serve --poll-seconds 0.1 --http 127.0.0.1:{port}"
    )
    *_, ask = re.split(r"^(?=curl )", script, flags=re.MULTILINE)
    waiting = f"while ({ask.strip()}) | grep --quiet 'matched_text[^,]*jane'; do sleep 0.2; done\n"
    printed = paste(folder, script.removesuffix(ask) + waiting + ask)
    before, after = (
        json.JSONDecoder().raw_decode(line)[0] for line in printed.splitlines() if line.startswith("{")
    )
    assert "jane" in before["drafts"][0]["matched_text"]
    assert "jane" not in after["drafts"][0]["matched_text"]
    assert printed.count("not yet") == 1
    assert "proven for support: 1 removed document" in printed


@NO_CURL
@pytest.mark.slow
@pytest.mark.data
def test_from_openais_client_to_an_agent(folder: Path, data: Path) -> None:
    pytest.importorskip("agents", reason="the package openai-agents is not installed")
    model = shutil.copytree(data / "models" / "stories260K", folder / "data" / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 8192}))
    page = read_page("docs/tutorials/client.md")
    checks = "import json\nassert json.loads(answer)['colour'] in ('red', 'green', 'blue')\nassert len(results) == 3\n"
    python = "\n".join([*page.blocks, checks])
    lookup, port = free_port(), free_port()
    script = "\n".join([*shell_of("client"), f"python - <<'END'\n{python}END"])
    script = script.replace("draftstore serve", f"draftstore serve --http 127.0.0.1:{lookup}")
    script = script.replace("draftstore worker", f"draftstore worker --port {port}").replace(
        ":8000/", f":{port}/"
    )
    printed = paste(folder, script)
    passes = [int(each) for each in re.findall(r" tokens, (\d+) passes$", printed, re.MULTILINE)]
    first, predicted, _, again = passes
    assert again < first / 2
    assert predicted < first / 2
