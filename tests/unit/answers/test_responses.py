"""A model's own answers: the same as plain decoding one by one, in any batch and after any interruption."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from draftstore.answers import responses
from draftstore.answers.responses import Journal, ResponseOptions, Responses, StoredAnswer, make_responses
from draftstore.decoding.replay import read_recordings
from draftstore.errors import BuildError, CorpusError, NoTextError
from draftstore.hf import load_model
from draftstore.hf.loading import LoadedModel
from draftstore.storage.report import ReadReport
from draftstore.storage.streams import read_lines
from draftstore.text.chat import plain_chat
from draftstore.text.corpus import find_files, read_files
from draftstore.text.tokenizer import TextTokenizer, load_tokenizer
from tests.fakes.hf_models import STORIES
from tests.unit.hf.test_loading import model_folder

__all__ = ["model_folder"]  # a fixture

pytestmark = pytest.mark.usefixtures("no_fsync")

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
NEW = 12


def write_records(path: Path, *records: object) -> Path:
    """Write a JSON Lines file; texts are lines as they are."""
    lines = (record if isinstance(record, str) else json.dumps(record) for record in records)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def read_records(path: Path) -> list[dict[str, Any]]:
    """Read a JSON Lines file, packed or not."""
    return [json.loads(line or b"") for line in read_lines(path, [])]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Return 20 prompts of many lengths."""
    salad = random.Random(5)
    words = " ".join(STORIES).split(" ")
    records = [{"prompt": " ".join(salad.choices(words, k=1 + i * 2 % 17))} for i in range(20)]
    return write_records(tmp_path / "prompts.jsonl", *records)


@pytest.fixture(scope="session")
def chat_folder(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the small model with a chat template."""
    folder = tmp_path_factory.mktemp("models") / "small-chat"
    folder.mkdir()
    for file in model_folder.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return folder


def make(options: ResponseOptions, model: Path, out: Path, **more: Any) -> Responses:
    return make_responses(options, model, out, **{"dtype": "float64", "device": "cpu", **more})


def answer_alone(loaded: LoadedModel, prompt: str, tokens: int = NEW) -> str:
    """Return what plain greedy `generate` says to one prompt, special tokens left out."""
    model: Any = loaded.model
    ids = torch.from_numpy(loaded.text.encode(prompt, bos=True).astype(np.int64))[None]
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False)
    kept = [token for token in output[0].tolist() if token not in loaded.text.special_ids]
    before = loaded.text.decode([token for token in ids[0].tolist() if token not in loaded.text.special_ids])
    return whole(loaded.text.decode(kept).removeprefix(before))


def whole(text: str) -> str:
    """Return a text without a character that is not finished at its end: random models write such."""
    return text.rstrip("\ufffd")


def test_greedy_answers_are_those_of_plain_decoding(
    model_folder: Path, prompts: Path, tmp_path: Path
) -> None:
    loaded = load_model(model_folder, dtype="float64", device="cpu")
    options = ResponseOptions(prompts=(prompts,), max_tokens=60)
    made = make(options, model_folder, tmp_path / "out.jsonl", batch=7)
    records = read_records(made.path)
    asked = [record["prompt"] for record in read_records(prompts)]
    assert [record["prompt"] for record in records] == asked
    assert [whole(record["output"]) for record in records] == [
        answer_alone(loaded, prompt, 60) for prompt in asked
    ]
    assert made.counts["answers"] == 20
    assert 0 < made.counts["cut"] < 20, "some end where the model ends them"
    assert (records[3]["id"], records[3]["model"]) == ("prompts.jsonl#4", model_folder.name)


def check_readers(answers: Path, tokenizer: TextTokenizer) -> None:
    """Check that builds and replays read the answers as they are."""

    def render(messages: Sequence[Any], prompt: bool = False) -> str:
        return tokenizer.render_chat(messages, add_generation_prompt=prompt)

    texts = [
        document.text for document in read_files(find_files([answers]), render=render, report=ReadReport())
    ]
    records, recordings = read_records(answers), read_recordings(answers, tokenizer)
    for text, record, recording in zip(texts, records, recordings, strict=True):
        assert text == (record["text"] if "text" in record else render(record["messages"]))
        seen = record["prompt"] if "text" in record else render(record["prompt"], True)
        ids = [*recording.prompt.tolist(), *recording.output.tolist()]
        assert ids == tokenizer.encode(seen + record["output"], bos=True).tolist()


def test_questions_are_asked_in_the_chat_template(chat_folder: Path, tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    questions = write_records(
        tmp_path / "q.jsonl",
        {"id": "a", "prompt": "The quick"},
        {"id": "b", "prompt": turns},
        {"id": "c", "messages": [*turns, {"role": "user", "content": "more"}]},
        {"id": "d", "conversations": [{"from": "human", "value": "ha"}, {"from": "gpt", "value": "ho"}]},
        {"id": 7, "text": "The lazy"},
    )
    loaded = load_model(chat_folder, dtype="float64", device="cpu")
    options = ResponseOptions(prompts=(questions,), max_tokens=NEW)
    made = make(options, chat_folder, tmp_path / "out.jsonl.zst")
    records = read_records(made.path)
    expected = {
        "a": [{"role": "user", "content": "The quick"}],
        "b": turns,
        "c": turns[:1],
        "d": [{"role": "user", "content": "ha"}],
        "7": [{"role": "user", "content": "The lazy"}],
    }
    assert {record["id"]: record["prompt"] for record in records} == expected
    for record in records:
        asked = loaded.text.render_chat(record["prompt"], add_generation_prompt=True)
        assert whole(record["output"]) == answer_alone(loaded, asked)
        answer = {"role": "assistant", "content": record["output"]}
        assert record["messages"] == [*record["prompt"], answer]
    check_readers(made.path, loaded.text)


def test_without_a_template_texts_go_on_and_conversations_are_plain(
    model_folder: Path, tmp_path: Path
) -> None:
    hi = [{"role": "user", "content": "hi"}]
    questions = write_records(tmp_path / "q.jsonl", {"prompt": "naïve 東"}, {"prompt": hi})
    loaded = load_model(model_folder, dtype="float64", device="cpu")
    options = ResponseOptions(prompts=(questions,), max_tokens=NEW)
    text, chat = read_records(make(options, model_folder, tmp_path / "out.jsonl").path)
    assert whole(text["output"]) == answer_alone(loaded, "naïve 東")
    assert text["text"] == "naïve 東" + text["output"]
    assert whole(chat["output"]) == answer_alone(loaded, plain_chat(hi, True)).removeprefix(" ")


def test_draws_depend_on_the_seed_alone(model_folder: Path, prompts: Path, tmp_path: Path) -> None:
    def drawn(name: str, batch: int, **changes: Any) -> list[str]:
        asked = {"temperature": 0.9, "top_p": 0.9, "samples": 2, "seed": 3, **changes}
        options = ResponseOptions(prompts=(prompts,), max_tokens=NEW, **asked)
        made = make(options, model_folder, tmp_path / name, batch=batch)
        return [record["output"] for record in read_records(made.path)]

    first = drawn("a.jsonl", 64)
    assert first == drawn("b.jsonl", 3)
    assert first != drawn("c.jsonl", 64, seed=4)
    assert first[::2] != first[1::2]
    ids = [record["id"] for record in read_records(tmp_path / "a.jsonl")]
    assert ids[:3] == ["prompts.jsonl#1#0", "prompts.jsonl#1#1", "prompts.jsonl#2#0"]


def test_unanswerable_prompts_are_counted(model_folder: Path, tmp_path: Path) -> None:
    questions = write_records(
        tmp_path / "q.jsonl",
        {"prompt": "The quick"},
        "no json",
        {"question": "?"},
        {"prompt": 7},
        {"prompt": "  "},
        {"messages": [{"role": "assistant", "content": "unasked"}]},
        {"messages": [{"role": "user"}]},
        {"prompt": "\udc80"},
        {"prompt": "The quick", "id": "again"},
        {"prompt": "x" * 3000},
        {"prompt": "The lazy"},
        {"prompt": "The dog"},
    )
    options = ResponseOptions(prompts=(questions,), max_tokens=NEW, limit=2)
    made = make(options, model_folder, tmp_path / "out.jsonl")
    counts = made.counts
    assert [record["prompt"] for record in read_records(made.path)] == ["The quick", "The lazy"]
    assert (counts["bad_records"], counts["repeated"], counts["too_long"]) == (7, 1, 1)
    assert [problem.reason for problem in made.problems][1:5] == [
        "has none of 'prompt', 'messages', 'conversations', 'text'",
        "'prompt' is an int, expected text or a list of messages",
        "'prompt' holds no question",
        "'messages' holds no question",
    ]
    assert made.problems[0].place == f"{questions}:line 2"
    with pytest.raises(CorpusError, match="line 2: not JSON"):
        make(options.changed(strict=True), model_folder, tmp_path / "strict.jsonl")
    with pytest.raises(NoTextError, match=r"no answer for .*: too long 5, bad records 7"):
        make(options.changed(limit=None, max_prompt_tokens=1), model_folder, tmp_path / "short.jsonl")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl", "out.jsonl.origin", "q.jsonl"]


def say(monkeypatch: pytest.MonkeyPatch, answers: Sequence[Sequence[int]]) -> None:
    """Have the model give these answers, and end each."""

    def decode(loaded: LoadedModel, requests: Any, _most: int) -> Any:
        return zip(requests, [[*answer, loaded.ends[0]] for answer in answers], strict=True)

    monkeypatch.setattr(responses, "_together", decode)


def test_empty_answers_and_special_tokens_are_skipped(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = load_tokenizer(model_folder)
    said = ["fine", "", " \n", "a <s> b", "and </s>", "<", "fine too"]
    apart = tokenizer.encode("<", bos=False).tolist() + tokenizer.encode("s> x", bos=False).tolist()
    ids = [*(tokenizer.encode(text, bos=False).tolist() for text in said[:5]), apart]
    ids.append([0, *tokenizer.encode("fine too", bos=False).tolist()])
    say(monkeypatch, ids)
    questions = write_records(tmp_path / "q.jsonl", *({"prompt": f"question {i}"} for i in range(7)))
    made = make(ResponseOptions(prompts=(questions,), max_tokens=NEW), model_folder, tmp_path / "out.jsonl")
    outputs = {record["id"].rpartition("#")[2]: record["output"] for record in read_records(made.path)}
    # Special tokens vanish; text that would be taken for one makes an answer useless.
    assert outputs == {"1": "fine", "4": "a  b", "5": "and ", "7": "fine too"}
    assert (made.counts["empty"], made.counts["special"], made.counts["answers"]) == (2, 1, 4)
    say(monkeypatch, [[]] * 7)
    with pytest.raises(NoTextError, match=r"no answer for .*empty 7"):
        make(ResponseOptions(prompts=(questions,)), model_folder, tmp_path / "none.jsonl")
    assert not (tmp_path / "none.jsonl").exists()


class Killed(BaseException):
    """What a test ends a run with."""


def test_an_interrupted_run_resumes_and_writes_the_same_bytes(
    model_folder: Path, prompts: Path, tmp_path: Path
) -> None:
    options = ResponseOptions(prompts=(prompts,), max_tokens=NEW, temperature=0.8, top_p=0.9)
    expected = make(options, model_folder, tmp_path / "a.jsonl")
    out = tmp_path / "out.jsonl"

    def kill(done: int, _total: int | None, _detail: str = "") -> None:
        if done == 7:
            with pytest.raises(BuildError, match="another build is running"):
                make(options, model_folder, out)
            raise Killed

    with pytest.raises(Killed):
        make(options, model_folder, out, batch=3, on_progress=kill)
    assert not out.exists()
    seen: list[tuple[Any, ...]] = []
    made = make(options, model_folder, out, batch=3, on_progress=lambda *counts: seen.append(counts))
    assert [done for done, _, _ in seen] == list(range(7, 21)), "what was finished is not decoded again"
    assert 0 < int(seen[-1][2].split()[0]) < expected.counts["tokens"]
    assert out.read_bytes() == expected.path.read_bytes()
    assert (made.reused, made.counts) == (False, expected.counts)
    assert not (tmp_path / ".out.jsonl.partial").exists()


def test_other_settings_start_anew_if_asked_to(
    model_folder: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.jsonl"
    options, other = (ResponseOptions(prompts=(prompts,), max_tokens=new) for new in (NEW, 5))
    first = make(options, model_folder, out)
    again = make(options, model_folder, out)
    assert (again.reused, again.counts) == (True, first.counts)
    with pytest.raises(BuildError, match=r"holds other answers: .* \(overwrite\)"):
        make(other, model_folder, out)
    assert make(other, model_folder, out, overwrite=True).counts["tokens"] < first.counts["tokens"]
    monkeypatch.setattr(responses, "load_model", None)
    assert make(other, model_folder, out, overwrite=True).reused
    out.write_bytes(out.read_bytes()[:-5])
    with pytest.raises(BuildError, match="holds other answers"):
        make(other, model_folder, out)
    (tmp_path / "out.jsonl.origin").unlink()
    with pytest.raises(BuildError, match="was not written by `draftstore responses`"):
        make(other, model_folder, out, overwrite=True)
    with pytest.raises(BuildError, match="choose one that ends in"):
        make(other, model_folder, tmp_path / "out.csv")


def test_a_journal_keeps_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    first, second = (StoredAnswer(number, "text é\n", 3, True) for number in range(2))
    journal = Journal(path)
    journal.add(first)
    journal.add(second)
    data = path.read_bytes()
    for cut in range(len(data) + 1):
        whole = data[:cut].count(b"\n")
        path.write_bytes(data[:cut] if whole < 2 else data + b"\xff\x00\n")
        journal = Journal(path)
        assert list(journal.answers.values()) == [first, second][:whole]
        journal.add(second)
        assert Journal(path).answers[1] == second
