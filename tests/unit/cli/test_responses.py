"""`draftstore responses`: its output, and the file that other commands read."""

import re
from pathlib import Path

import pytest

from tests.unit.answers.test_responses import chat_folder, read_records, write_records
from tests.unit.cli.test_commands import Runner, run
from tests.unit.hf.test_loading import model_folder

__all__ = ["chat_folder", "model_folder", "run"]  # fixtures

pytestmark = pytest.mark.usefixtures("no_fsync")


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    texts = ("The quick", "The lazy dog", "for item in", "The quick")
    return write_records(tmp_path / "questions.jsonl", *({"prompt": text} for text in texts), "no json")


def test_answers_are_a_corpus_and_recordings(
    run: Runner, chat_folder: Path, questions: Path, tmp_path: Path
) -> None:
    out = tmp_path / "answers.jsonl.zst"
    arguments = ["responses", "--model", chat_folder, "--prompts", questions, "--out", out]
    arguments += ["--max-tokens", 40]
    ran = run(*arguments)
    assert (ran.status, ran.out) == (0, f"{out}\n")
    assert re.search(r"answers +3\b", ran.err)
    assert f"1 bad record was skipped:\n  {questions}:line 5: not JSON" in ran.err
    assert re.search(r"repeated prompts +1, skipped", ran.err)
    again = run(*arguments, "--json").json()
    assert (again["reused"], again["path"], again["counts"]["answers"]) == (True, str(out), 3)
    store = tmp_path / "store"
    built = run("build", "rest", "--corpus", out, "--tokenizer", chat_folder, "--out", store, "--json").json()
    assert (built["counts"]["documents"], built["bad_records"]) == (3, 0)
    replayed = run("replay", store, "--replays", out, "--recorded-by", "small-chat", "--json").json()
    assert replayed["rows"] == 3
    assert replayed["accepted_length"] > 3  # it drafts the very answers that it was built from


def test_prompts_of_several_files_and_draws(
    run: Runner, model_folder: Path, questions: Path, tmp_path: Path
) -> None:
    more = write_records(tmp_path / "more.jsonl", {"id": "more", "text": "The fox"})
    out = tmp_path / "answers.jsonl"
    asked = ["--prompts", questions, more, "--max-tokens", 5, "--batch", 2]
    drawn = ["--temperature", 0.7, "--top-p", 0.95, "--samples", 2, "--seed", 9]
    made = run("responses", "--model", model_folder, *asked, *drawn, "--out", out, "--json").json()
    assert made["counts"]["answers"] + made["counts"]["empty"] == 8
    assert made["problems"][0]["place"] == f"{questions}:line 5"
    assert {record["id"] for record in read_records(out)} >= {"more#0", "questions.jsonl#1#1"}
