"""README and docs on decoding are run: every command line and Python example that takes a model."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from draftstore.text.python_source import find_sources, hold_out, write_corpus, write_recordings
from tests import ROOT
from tests.journey.examples import COMMANDS, DECODING, MODEL, run


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
