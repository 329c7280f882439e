"""`draftstore gain` equals `build rest` and `replay` of the same halves, in every row."""

import json
from pathlib import Path
from typing import Any

import pytest

from draftstore.decoding.curve import CostCurve, Costs
from tests.unit.cli.test_commands import Runner, run, tokenizer

__all__ = ["run", "tokenizer"]  # fixtures

OPTIONS = {
    "request": ("--request",),
    "request + live": ("--request", "--live"),
    "request + store": ("--request",),
    "request + live + store": ("--request", "--live"),
}
SHAPES = {"chain of 8": ("--chain", 8), "tree of 16": ("--budget", 16), "tree of 64": ()}
ANSWERS = ("return left + right", "the quick brown fox jumps", "for item in items: print(item)")


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "log.jsonl"
    records = []
    for number in range(12):
        turns = [
            f"question {number}?",
            f"{ANSWERS[number % 3]} {number % 4}",
            "and?",
            ANSWERS[number % 2] * 2,
        ]
        messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)]
        records += [{"messages": messages[:2]}, {"messages": messages}]
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path


def test_it_equals_builds_and_replays(run: Runner, log: Path, tokenizer: Path, tmp_path: Path) -> None:
    work = tmp_path / "work"
    found = run("gain", log, "--tokenizer", tokenizer, "--work", work, "--json").json()
    assert (found["conversations"], found["outputs"], found["replayed"]) == (12, 24, 12)
    assert len(found["rows"]) == 12
    for half, other in ((1, 2), (2, 1)):
        store = tmp_path / f"store-{other}"
        run(
            "build",
            "rest",
            "--corpus",
            work / f"half-{other}.jsonl",
            "--tokenizer",
            tokenizer,
            "--out",
            store,
        )
        for row in found["rows"]:
            subject: list[Any] = [store] if "store" in row["sources"] else ["--tokenizer", tokenizer]
            options = *OPTIONS[row["sources"]], *SHAPES[row["drafts"]]
            replays = "--replays", work / f"replayed-{half}.jsonl"
            replayed = run("replay", *subject, *options, *replays, "--json").json()
            assert replayed["accepted_length"] == round(row["halves"][half - 1], 4)
            assert replayed["rows"] == 12
    for row in found["rows"]:
        assert row["interval"][0] <= row["length"] <= row["interval"][1]
        assert min(row["halves"]) <= row["length"] <= max(row["halves"])


def test_a_draw_is_the_same_again_and_its_curve_gives_speeds(
    run: Runner, log: Path, tokenizer: Path, tmp_path: Path
) -> None:
    """At 32 texts, passes of this curve cost as much as their rows: no draft pays there."""
    batch = Costs(32, (1, 65), (0.032, 0.032 * 65))
    CostCurve((1, 65), (0.01, 0.01), batches=(batch,)).save(tmp_path / "curve.json")
    options = "--tokenizer", tokenizer, "--tokens", 60, "--curve", tmp_path / "curve.json"
    picture = tmp_path / "gain.svg"
    found, again = (run("gain", log, *options, "--picture", picture, "--json").json() for _ in range(2))
    assert found["tokens"] <= 60
    assert 2 <= found["replayed"] < 12
    assert found["plain"] == {"1": 100.0, "32": 1000.0}, "of the numbers of texts that were measured"
    for row, same in zip(found["rows"], again["rows"], strict=True):
        assert (row["length"], row["interval"]) == (same["length"], same["interval"])
        assert 0.8 * 100 * row["length"] < row["speeds"]["1"] <= 100 * row["length"]
        assert row["speeds"]["32"] < 1000
    assert picture.read_text().startswith("<svg")


def test_the_table_and_what_was_skipped(run: Runner, log: Path, tokenizer: Path) -> None:
    log.write_text(log.read_text() + "no record\n")
    ran = run("gain", log, "--tokenizer", tokenizer)
    assert "request + live + store │ tree of 64" in ran.out
    assert "12 conversations with 24 answers; replayed: 12 conversations" in ran.out
    assert "warning: 1 record skipped; the first: " in ran.err
    assert "line 25: not JSON" in ran.err


def test_one_sentence_for_a_log_without_two_conversations(
    run: Runner, tokenizer: Path, tmp_path: Path
) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    error = run("gain", empty, "--tokenizer", tokenizer).error()
    assert "a gain needs two conversations with an answer" in error


def test_rollouts_give_the_figures_of_their_texts(
    run: Runner, log: Path, tokenizer: Path, tmp_path: Path
) -> None:
    named, other = tmp_path / "named.jsonl", tmp_path / "verl.jsonl"
    for path, keys in ((named, ("prompt", "output")), (other, ("input", "output"))):
        records = [dict(zip(keys, (f"question {n}? ", ANSWERS[n % 3]), strict=True)) for n in range(4)]
        path.write_text("".join(f"{json.dumps({'id': n, **each})}\n" for n, each in enumerate(records)))
    expected = run("gain", named, "--tokenizer", tokenizer, "--json").json()
    found = run(
        "gain", other, "--tokenizer", tokenizer, "--fields", "prompt=input,output=output", "--json"
    ).json()
    for row in (*expected["rows"], *found["rows"]):
        del row["draft_us"]
    assert found == expected
