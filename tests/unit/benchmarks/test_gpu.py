"""What only a GPU can measure runs here at toy size, with small texts and random models."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zstandard

from benchmarks import gpu, gpu_kit, gpu_tests
from benchmarks.decode_runs import LOOP
from benchmarks.gpu_report import write_report
from benchmarks.gpu_sheet import Sheet
from benchmarks.smollm import NAME
from tests import ROOT
from tests.conftest import small_tokenizer_folder, write_texts
from tests.fakes.hf_models import build

ABSENT = ("alembic", "faiss", "polars", "prefect", "psycopg", "scann", "sqlalchemy", "starlette", "uvicorn")
"""Packages that a machine with a GPU need not have."""


def write_zst(path: Path, text: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(zstandard.compress(text))


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder like that of the test data, with a model of two layers in `live`."""
    folder = tmp_path_factory.mktemp("gpu") / "data"
    for name in ("llama2", "smollm2"):
        (folder / "tokenizers").mkdir(parents=True, exist_ok=True)
        small_tokenizer_folder(folder / "tokenizers" / name)
    text = write_texts(folder / "texts.jsonl", 60).read_bytes()
    for name in ("chat_sharegpt", "chat_instruct_mix"):
        write_zst(folder / "corpora" / f"{name}.jsonl.zst", text)
    spoken = [json.loads(line)["text"] for line in text.splitlines()[:6]]
    records = [
        {
            "id": str(place),
            "model": "vicuna-7b-v1.5",
            "prompt": [{"role": "user", "content": "hi"}],
            "output": each,
        }
        for place, each in enumerate(spoken)
    ]
    lines = "".join(json.dumps(record) + "\n" for record in records)
    write_zst(folder / "replays" / "alpaca_eval.jsonl.zst", lines.encode())
    live = small_tokenizer_folder(folder / "live")
    model: Any = build(vocab_size=384, hidden_size=32, num_hidden_layers=1)
    model.float().save_pretrained(live)
    return folder


def run(toy: Path, out: Path, capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, Any]:
    """Run the command, and return its last line."""
    places = [
        "--data",
        str(toy),
        "--work",
        str(toy / "work"),
        "--out",
        str(out),
        "--model",
        str(toy / "live"),
    ]
    gpu.main([*places, "--quick", *more])
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found


def test_every_part_runs_is_skipped_the_next_time_and_drawn(
    toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["curve_tiny", "decode_tiny", "recycling", "dresd", "host_tiny"]
    parts = ["--parts", "curve,decode,recycling,dresd,host"]
    found = run(toy, tmp_path, capsys, *parts)
    assert [state["part"] for state in found["parts"]] == names
    assert [state["errors"] for state in found["parts"]] == [[]] * 5
    sheets = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in names}
    for sheet in sheets.values():
        assert sheet["complete"]
        assert {"date", "device", "versions", "machine"} <= sheet.keys()
    check_curve(sheets["curve_tiny"]["cells"])
    check_live(sheets)
    again = run(toy, tmp_path, capsys, *parts)
    assert all(state["skipped"] for state in again["parts"])
    run(toy, tmp_path, capsys, "--report")
    page = (tmp_path / "report.md").read_text()
    assert all(f"## {name.replace('_', ', ')}" in page for name in names)
    assert "failed | error" not in page
    assert len(list(tmp_path.glob("*.png"))) == 2


def check_curve(cells: dict[str, Any]) -> None:
    passes = [cell for cell in cells.values() if "way" in cell]
    assert {(cell["way"], cell["texts"], cell["rows"]) for cell in passes} >= {
        ("graphs", 1, 1), ("graphs", 2, 4), ("eager", 2, 4), ("flex", 1, 1),
    }  # fmt: skip
    assert all(cell["milliseconds"] > 0 and cell["roofline_milliseconds"] > 0 for cell in passes)
    (attention,) = [cell["ways"] for cell in cells.values() if "ways" in cell]
    assert set(attention) == {"repeated", "gqa", "folded", "flex", "flex blocks"}
    assert all(way["deviation"] < 1e-5 for way in attention.values())


def check_live(sheets: dict[str, Any]) -> None:
    for name in ("recycling", "dresd"):
        rows = [cell for cell in sheets[name]["cells"].values() if "identical" in cell]
        assert len(rows) == 2 * 4
        assert all(row["identical"] + row["excused"] == row["outputs"] for row in rows)
    assert sheets["dresd"]["cells"]["store"]["counts"]["entries"] > 100
    assert 0 <= sheets["host_tiny"]["cells"]["1 texts, our loop, no drafts"]["host_share"] < 1


def test_tests_are_run_in_a_process_of_their_own(
    toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = ["import pytest", "pytestmark = pytest.mark.gpu"]
    lines += ["def test_a(): pass", "def test_b(): assert False", "def test_c(): pytest.skip('no GPU')"]
    (tmp_path / gpu_tests.QUICK_FILE).write_text("\n".join(lines))
    monkeypatch.setattr(gpu_tests, "FOLDER", tmp_path)
    with pytest.raises(SystemExit):
        run(toy, tmp_path, capsys, "--parts", "tests")
    (state,) = json.loads(capsys.readouterr().out.splitlines()[-1])["parts"]
    assert state["complete"]
    assert state["errors"] == [gpu_tests.QUICK_FILE]
    (cell,) = json.loads((tmp_path / "tests.json").read_text())["cells"].values()
    assert (cell["tests"], cell["passed"], cell["skipped"], cell["failed"]) == (3, 1, 1, ["test_b"])
    assert "def test_b" in cell["output"]


def test_a_part_that_cannot_run_does_not_stop_the_others(
    toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended_badly = SimpleNamespace(returncode=4, stdout="no such file")
    monkeypatch.setattr(subprocess, "run", lambda *_args, **_options: ended_badly)
    for part in ("curve", "recycling"):
        monkeypatch.setitem(gpu.PARTS, part, lambda part: print(part.bench.live))
    (tmp_path / "live").mkdir()
    with pytest.raises(SystemExit) as ended:
        run(toy, tmp_path, capsys, "--parts", "curve,recycling,tests", "--model", str(tmp_path / "live"))
    assert ended.value.code == 1
    states = json.loads(capsys.readouterr().out.splitlines()[-1])["parts"]
    assert [state["errors"] for state in states] == [["part"], ["part"], ["test_gpu_batches.py"]]
    found = json.loads((tmp_path / "recycling.json").read_text())
    assert "holds no model.safetensors" in found["cells"]["part"]["error"]
    assert not found["complete"]


def test_a_sheet_goes_on_where_it_was_cut(tmp_path: Path) -> None:
    def fail() -> dict[str, Any]:
        raise ValueError("no such kernel")

    path = tmp_path / "part.json"
    sheet = Sheet(path, {"part": "x"})
    assert sheet.cell("a", lambda: {"value": 1})
    assert sheet.cell("b", fail) is None
    assert not sheet.complete
    late = Sheet(path, {"part": "x"}, minutes=-1)
    assert late.cell("a", fail) == sheet.cells["a"], "measured once"
    assert late.cell("b", lambda: {"value": 2}) is None
    assert late.cut == ["b"]
    last = Sheet(path, {"part": "x"})
    assert last.cells["b"]["error"] == "ValueError: no such kernel"
    assert last.cell("b", lambda: {"value": 2})
    assert last.complete


def test_a_kit_holds_data_and_pieces_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data, kit = tmp_path / "data", tmp_path / "kit"
    for name in gpu_kit.FILES:
        (data / name).parent.mkdir(parents=True, exist_ok=True)
        (data / name).write_bytes(b"x")
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / gpu_kit.WHEEL).write_bytes(bytes(range(25)))
    monkeypatch.setattr(gpu_kit, "PIECE", 10)
    gpu.main(["--data", str(data), "--wheels", str(tmp_path / "wheels"), "--prepare", str(kit)])
    found = json.loads(capsys.readouterr().out)
    assert found["bytes"] == {"data": len(gpu_kit.FILES), "model-0": 10, "model-1": 10, "model-2": 5}
    assert gpu.parse_arguments(["--kit", str(kit)]).data == kit / "data"
    joined = gpu_kit.join_wheel(kit, tmp_path / "work")
    assert joined is not None
    assert (joined / gpu_kit.WHEEL).read_bytes() == bytes(range(25))
    assert gpu_kit.join_wheel(None, tmp_path / "nothing") is None
    (data / "models" / NAME / "config.json").unlink()
    with pytest.raises(SystemExit, match=r"config\.json"):
        gpu_kit.prepare(data, None, kit)


def test_the_page_judges_speeds_and_names_what_failed(tmp_path: Path) -> None:
    def cell(texts: int, way: str, speed: float) -> dict[str, Any]:
        return {"texts": texts, "way": way, "tokens_per_second": speed}

    rows = [cell(1, "plain, dynamic", 90), cell(1, "plain, static", 100), cell(1, LOOP, 110)]
    rows += [cell(1, "all, planned", 260), cell(8, "plain, static", 100), cell(8, "all, planned", 96)]
    cells = {str(place): row for place, row in enumerate(rows)} | {"cost curve": {"error": "out of memory"}}
    versions = {"torch": "2", "transformers": "5"}
    about = {
        "part": "decode",
        "date": "today",
        "device": {"name": "GPU"},
        "versions": versions,
        "quick": False,
    }
    (tmp_path / "decode_8b.json").write_text(json.dumps(about | {"complete": False, "cells": cells}))
    page = write_report(tmp_path).read_text()
    assert "- 1 texts: 2.6 of plain generate; the goal is 2.5: reached" in page
    assert "- 8 texts: 0.96 of plain generate; the goal is 1.7: NOT reached" in page
    assert "over plain generate: 0.96 (8 texts, all, planned); the goal is 0.98: NOT reached" in page
    assert f"over {LOOP}: 2.364 (1 texts, all, planned); the goal is 0.98: reached" in page
    assert "| cost curve | out of memory |" in page
    with pytest.raises(SystemExit, match="no figures"):
        write_report(tmp_path / "nothing")


def test_parts_and_shapes() -> None:
    units = gpu.units_of(["tests", "decode", "host-8b"], ["1b", "8b"])
    assert [unit.name for unit in units] == ["tests", "decode_1b", "decode_8b", "host_8b"]
    for wrong in (["--parts", "recycling-8b"], ["--parts", "nonsense"], ["--shapes", "70b"]):
        with pytest.raises(SystemExit):
            gpu.parse_arguments(wrong)


def test_nothing_is_imported_that_a_gpu_machine_need_not_have() -> None:
    code = f"import sys; sys.modules.update(dict.fromkeys({ABSENT})); import benchmarks.gpu, tests.conftest"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
