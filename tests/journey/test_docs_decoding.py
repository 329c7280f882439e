"""README and docs on decoding are run: every command line and Python example that takes a model."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from draftstore.text.python_source import find_sources, hold_out, write_corpus, write_recordings
from tests import ROOT
from tests.fakes.servers import free_port
from tests.journey.examples import COMMANDS, DECODING, MODEL, run
from tests.journey.pages import read_page

SECONDS = 600.0
"""How long the services may take to get ready where no kernel was compiled before."""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Write what the commands need of the quickstart's files: its texts, and its recordings."""
    folder = tmp_path / "data" / "quickstart"
    folder.mkdir(parents=True)
    stored, held = hold_out(find_sources([ROOT / "services"]), 10)
    write_corpus(folder / "corpus.jsonl", stored)
    write_recordings(folder / "held-out.jsonl", held)
    return tmp_path


@pytest.fixture
def model(checkout: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Have a small trained model where the pages have theirs, and keep its cost curve out of the user's home."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(checkout / "cache"))
    monkeypatch.chdir(checkout)
    monkeypatch.setattr("draftstore.hf.tuning._spread", lambda _times: 0.0)  # on a busy machine
    path = checkout / MODEL
    path.symlink_to(data / "models" / "stories260K")
    lines = [json.dumps({"prompt": text}) for text in ("Once upon a time", "The dog", "def main(", "It was")]
    (path.parent / "prompts.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return path


@pytest.mark.slow
@pytest.mark.data
@pytest.mark.skipif(not shutil.which("curl"), reason="needs curl")
def test_live_memory_works_as_pasted(model: Path, checkout: Path) -> None:
    (build,) = (each for each in COMMANDS if each.endswith("--out data/model-store"))
    run(shlex.split(build), checkout)
    (block,) = re.findall(
        r"^```sh\n(draftstore serve [^\n]+ --live .+?)^```", read_page("docs/service.md").text, re.M | re.S
    )
    lookup, port = free_port(), free_port()
    block = block.replace("draftstore serve", f"draftstore serve --http 127.0.0.1:{lookup}")
    block = block.replace("draftstore worker", f"draftstore worker --port {port}").replace(
        ":8000/", f":{port}/"
    )
    ask = block[block.index("curl ") :]
    shim = f'draftstore() {{ exec {sys.executable} -m draftstore "$@"; }}\n'
    about = os.environ | {"PYTHONPATH": str(ROOT), "DRAFTSTORE_SOCKET": str(checkout / "lookup.sock")}
    answers = checkout / "answers"
    with answers.open("wb") as out:
        shell = subprocess.Popen(
            ["bash", "-c", shim + block + "echo\n" + ask], stdout=out, env=about, start_new_session=True
        )
        try:
            assert shell.wait(timeout=SECONDS) == 0
        finally:
            os.killpg(shell.pid, signal.SIGTERM)
    found = [json.loads(line) for line in answers.read_text().splitlines() if line.startswith("{")]
    first, again = (each["choices"][0]["message"]["content"] for each in found)
    assert first == again
    live = found[1]["usage"]["draftstore"]["sources"]["live:team"]
    assert live["matched"] > found[0]["usage"]["draftstore"]["sources"]["live:team"]["matched"]


@pytest.mark.slow
@pytest.mark.data
def test_decoding_with_drafts_works_as_the_pages_say(model: Path, checkout: Path) -> None:
    commands = [command for command in COMMANDS if MODEL in command]
    names_of_commands = [command.split()[0] for command in commands]
    assert names_of_commands == ["build", "tune", "generate", "responses", "build", "replay", "generate"]
    for command in commands:
        assert run(shlex.split(command), checkout), command
    assert DECODING.keys() == {"README.md", "docs/decoding.md"}
    for page, code in DECODING.items():
        names: dict[str, Any] = {}
        exec(code, names)
        plain = names["model"].generate(**names["inputs"], max_new_tokens=40)
        same = names["same"] if page == "docs/decoding.md" else names["text"]
        assert names["text"].tolist() == same.tolist() == plain.tolist()
