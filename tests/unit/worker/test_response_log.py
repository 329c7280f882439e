import json
import os
import stat
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from draftstore.stores.registry import open_store
from draftstore.stores.rest.build import RestOptions, build_rest
from draftstore.text.digests import identify
from draftstore.text.records import content_of
from draftstore.text.tokenizer import TextTokenizer
from services.worker.response_log import ResponseLog, as_line, older
from tests.fakes.waiting import until
from tests.fakes.workers import MODEL, FakeEngine, Worker, running_worker

CHAT = [
    {"role": "developer", "content": "Be brief.\n"},
    {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
]


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def wait_for_count(count: Counter[str], written: int) -> None:
    until(lambda: count["written"] == written)


def wait_for_lines(worker: Worker, outcome: str, lines: int) -> None:
    until(lambda: worker.metric("response_log_lines_total", outcome=outcome) == lines)


def test_finished_answers_are_kept_as_a_corpus(small_tokenizer: TextTokenizer, tmp_path: Path) -> None:
    log = tmp_path / "answers.jsonl"
    ids = small_tokenizer.encode("zero", bos=True).tolist()
    engine = FakeEngine(small_tokenizer, " naïve\n東京")
    with running_worker(engine, log=log) as worker:
        replies = [
            worker.ask("chat", messages=CHAT)[1],
            worker.ask("completions", prompt="zero", max_tokens=100)[1],
            worker.ask("completions", prompt=ids, max_tokens=2)[1],
        ]
        worker.stream("chat", messages=CHAT)
        worker.ask("chat", messages=[])  # refused
        worker.ask("completions", prompt="zero", max_tokens=100, stop=[" na"])  # nothing was said
        wait_for_lines(worker, "written", 4)
    kept = records(log)
    digests = [identify(content_of(record)[1]).document for record in kept]
    assert [digest for _, digest in engine.remembered] == digests, "those of the lines as they were written"
    assert [record["id"] for record in kept[:3]] == [reply["id"] for reply in replies]
    assert {record["model"] for record in kept} == {MODEL}
    turns = [{"role": "system", "content": "Be brief.\n"}, {"role": "user", "content": "Hi"}]
    assert (
        kept[0]["messages"]
        == kept[3]["messages"]
        == [*turns, {"role": "assistant", "content": "naïve\n東京"}]
    )
    assert kept[1]["text"] == "zero naïve\n東京"
    assert kept[2]["text"] == "zero" + replies[2]["choices"][0]["text"]
    assert stat.S_IMODE(log.stat().st_mode) == 0o600
    built = build_rest(
        RestOptions(corpus=(log,), name="answers"), small_tokenizer, tmp_path / "store", workers=1
    ).path
    store = open_store(built)
    assert store.manifest.counts["documents"] == 4
    store.close()


def test_a_full_log_drops_its_older_half(tmp_path: Path) -> None:
    path, count = tmp_path / "a.jsonl", Counter[str]()
    log = ResponseLog(path, 1000, lambda word: count.update([word]))
    for number in range(40):
        log.put(as_line({"text": f"{number:03}" + "x" * 80}))
        wait_for_count(count, number + 1)
        assert path.stat().st_size <= 500
        assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= 1000
    log.put(as_line({"text": "y" * 500}))
    log.close()
    assert count == {"written": 40, "dropped": 1}
    assert older(path) == tmp_path / "a.1.jsonl"
    kept = [int(record["text"][:3]) for file in (older(path), path) for record in records(file)]
    assert kept == list(range(kept[0], 40))
    assert len(kept) >= 5


def test_a_full_disk_breaks_no_answer_and_leaves_no_half_line(
    small_tokenizer: TextTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, write = tmp_path / "a.jsonl", os.write
    full = threading.Event()

    def write_some(file: int, data: Any) -> int:
        if not full.is_set():
            return write(file, data)
        return write(file, data[:-40])

    monkeypatch.setattr(os, "write", write_some)
    with running_worker(FakeEngine(small_tokenizer), log=path) as worker:
        for change, outcome, expected in (
            (full.clear, "written", 1), (full.set, "failed", 1), (full.clear, "written", 2),
        ):  # fmt: skip
            change()
            assert worker.ask("completions", prompt="zero", max_tokens=100)[0] == 200
            wait_for_lines(worker, outcome, expected)
    assert len(records(path)) == 2
