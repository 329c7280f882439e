"""A model's own answers: those of plain decoding one by one, whatever the batch and wherever a run was cut off."""

import gzip
import json
import os
import random
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from draftstore.answers import batches, responses
from draftstore.answers.batches import Choice, Row, decode_rows, draw
from draftstore.answers.journal import Journal, StoredAnswer
from draftstore.answers.prompts import Asking, read_prompts
from draftstore.answers.responses import ResponseOptions, Responses, make_responses, origin_path
from draftstore.decoding.replay import read_recordings
from draftstore.errors import BuildError, CorpusError, ModelError, NoTextError, TokenizerError
from draftstore.hf import load_model
from draftstore.hf.loading import LoadedModel
from draftstore.storage.report import ReadReport
from draftstore.storage.streams import read_lines
from draftstore.text.chat import plain_chat
from draftstore.text.conversation import encode_conversation
from draftstore.text.corpus import read_corpus
from draftstore.text.tokenizer import TextTokenizer, load_tokenizer
from tests.fakes import killed
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
    return [json.loads(line or b"") for line in read_lines(path)]


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
    told = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False)
    kept = [token for token in told[0].tolist() if token not in loaded.text.special_ids]
    before = loaded.text.decode([token for token in ids[0].tolist() if token not in loaded.text.special_ids])
    return whole(loaded.text.decode(kept).removeprefix(before))


def whole(text: str) -> str:
    """Return a text without a character that is not finished at its end: random models write such."""
    return text.rstrip("\ufffd")


# --- what is answered ---


@pytest.mark.data
@pytest.mark.parametrize("batch", [1, 7, 64])
def test_greedy_answers_are_those_of_plain_decoding(
    data: Path, tmp_path: Path, prompts: Path, batch: int
) -> None:
    folder = data / "models" / "stories260K"
    loaded = load_model(folder, dtype="float64", device="cpu")
    options = ResponseOptions((prompts,), max_new_tokens=NEW)
    made = make(options, folder, tmp_path / "out.jsonl", batch=batch)
    records = read_records(made.path)
    assert [record["prompt"] for record in records] == [record["prompt"] for record in read_records(prompts)]
    assert [record["output"] for record in records] == [
        answer_alone(loaded, record["prompt"]) for record in records
    ]
    assert made.counts["answers"] == made.counts["decoded"] == 20
    assert made.counts["tokens"] == 20 * NEW
    assert made.counts["cut"] == 20
    assert records[3]["id"] == "prompts.jsonl#4"
    assert records[3]["model"] == "stories260K"
    assert records[3]["decoding"] == {"temperature": 0.0, "max_new_tokens": NEW}


@pytest.mark.parametrize("penalty", [1.0, 1.8])
def test_answers_end_where_the_model_ends_them(model_folder: Path, prompts: Path, penalty: float) -> None:
    loaded = load_model(model_folder, dtype="float64", device="cpu")
    config: Any = loaded.model.generation_config
    config.repetition_penalty = penalty
    ids = [encode_conversation(loaded.text, record["prompt"]) for record in read_records(prompts)]
    answers = decode_rows(loaded, [Row(prompt) for prompt in ids], Choice(60))
    model: Any = loaded.model
    for prompt, answer in zip(ids, answers, strict=True):
        row = torch.from_numpy(prompt.astype(np.int64))[None]
        told = model.generate(
            row, attention_mask=torch.ones_like(row), max_new_tokens=60, do_sample=False, pad_token_id=1
        )
        expected = told[0, len(prompt) :].tolist()
        assert answer == (expected[:-1] if expected[-1] == 1 else expected)
    assert len({len(answer) for answer in answers}) > 1


def test_questions_are_asked_in_the_chat_template(chat_folder: Path, tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    questions = write_records(
        tmp_path / "q.jsonl",
        {"id": "a", "prompt": "The quick"},
        {"id": "b", "prompt": turns},
        {"id": "c", "messages": [*turns, {"role": "user", "content": "more"}]},
        {"id": 7, "text": "The lazy"},
    )
    loaded = load_model(chat_folder, dtype="float64", device="cpu")
    options = ResponseOptions((questions,), max_new_tokens=NEW, system="be brief")
    records = read_records(make(options, chat_folder, tmp_path / "out.jsonl").path)
    system = {"role": "system", "content": "be brief"}
    expected: dict[str, list[dict[str, str]]] = {
        "a": [system, {"role": "user", "content": "The quick"}],
        "b": [system, *turns],
        "c": [system, turns[0]],
        "7": [system, {"role": "user", "content": "The lazy"}],
    }
    assert {record["id"]: record["prompt"] for record in records} == expected
    for record in records:
        asked = loaded.text.render_chat(record["prompt"], add_generation_prompt=True)
        assert whole(record["output"]) == answer_alone(loaded, asked)
        answer = {"role": "assistant", "content": record["output"]}
        assert record["messages"] == [*record["prompt"], answer]
        assert "text" not in record


def test_without_a_template_texts_go_on_and_conversations_are_plain(
    model_folder: Path, tmp_path: Path
) -> None:
    hi = [{"role": "user", "content": "hi"}]
    questions = write_records(tmp_path / "q.jsonl", {"prompt": "The quick"}, {"prompt": hi})
    loaded = load_model(model_folder, dtype="float64", device="cpu")
    text, chat = read_records(
        make(ResponseOptions((questions,), max_new_tokens=NEW), model_folder, tmp_path / "out.jsonl").path
    )
    assert whole(text["output"]) == answer_alone(loaded, "The quick")
    assert text["text"] == "The quick" + text["output"]
    assert whole(chat["output"]) == answer_alone(loaded, plain_chat(hi, True)).removeprefix(" ")


def test_builds_and_replays_read_the_answers(chat_folder: Path, model_folder: Path, tmp_path: Path) -> None:
    questions = write_records(tmp_path / "q.jsonl", {"prompt": "The quick"}, {"prompt": "naïve 東"})
    for folder in (chat_folder, model_folder):
        tokenizer = load_tokenizer(folder)
        out = tmp_path / f"{folder.name}.jsonl.zst"
        records = read_records(make(ResponseOptions((questions,), max_new_tokens=NEW), folder, out).path)

        def render(messages: Sequence[Any], tokenizer: TextTokenizer = tokenizer) -> str:
            return tokenizer.render_chat(messages, add_generation_prompt=False)

        texts = [document.text for document in read_corpus([out], render=render, report=ReadReport())]
        for text, record, recording in zip(texts, records, read_recordings(out, tokenizer), strict=True):
            assert text == (record["text"] if "text" in record else render(record["messages"]))
            seen = record["prompt"]
            if not isinstance(seen, str):
                seen = tokenizer.render_chat(seen, add_generation_prompt=True)
            ids = [*recording.prompt.tolist(), *recording.output.tolist()]
            assert ids == tokenizer.encode(seen + record["output"], bos=True).tolist()


# --- drawing ---


def test_draws_depend_on_the_seed_alone(model_folder: Path, prompts: Path, tmp_path: Path) -> None:
    def drawn(name: str, batch: int, **changes: Any) -> list[str]:
        asked = {"temperature": 0.9, "top_p": 0.9, "samples": 2, "seed": 3, **changes}
        options = ResponseOptions((prompts,), max_new_tokens=NEW, **asked)
        made = make(options, model_folder, tmp_path / name, batch=batch)
        return [record["output"] for record in read_records(made.path)]

    first = drawn("a.jsonl", 64)
    assert first == drawn("b.jsonl", 3)
    assert first != drawn("c.jsonl", 64, seed=4)
    assert first[::2] != first[1::2]
    records = read_records(tmp_path / "a.jsonl")
    assert [record["id"] for record in records[:3]] == [f"prompts.jsonl#{n}" for n in ("1#0", "1#1", "2#0")]
    assert records[0]["decoding"] == {"temperature": 0.9, "max_new_tokens": NEW, "top_p": 0.9, "seed": 3}


@pytest.mark.parametrize("top_p", [0.3, 0.8, 0.97, 1.0])
@pytest.mark.parametrize("heads", [(4, 9), (1024,)])
def test_tokens_are_drawn_as_often_as_they_are_likely(
    top_p: float, heads: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.generation.logits_process import TopPLogitsWarper

    monkeypatch.setattr(batches, "HEADS", heads)
    torch.manual_seed(1)
    scores = torch.randn(5, 40, dtype=torch.float64) * 2
    count = 20_000
    numbers = (
        (torch.arange(count) + 0.5) / count
    ).double()  # evenly: frequencies are exact but for one in 20,000
    warper: Any = TopPLogitsWarper(top_p)
    expected = torch.softmax(warper(None, scores / 0.7) if top_p < 1 else scores / 0.7, -1)
    for row, likely in zip(scores, expected, strict=True):
        tokens = draw(row.expand(count, -1), numbers, 0.7, top_p)
        found = torch.bincount(tokens, minlength=40) / count
        assert float((found - likely).abs().max()) <= 1.5 / count
    ends = draw(scores, torch.tensor([0.0, 1.0, 0.0, 1.0, 1.0]), 0.7, top_p)  # 1 can come of rounding
    assert all(likely[token] > 0 for token, likely in zip(ends, expected, strict=True))


# --- what is left out ---


def test_what_cannot_be_answered_is_counted(model_folder: Path, tmp_path: Path) -> None:
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
    options = ResponseOptions((questions,), max_new_tokens=NEW, limit=2)
    made = make(options, model_folder, tmp_path / "out.jsonl")
    counts = made.counts
    assert [record["prompt"] for record in read_records(made.path)] == ["The quick", "The lazy"]
    assert (counts["bad_records"], counts["repeated"], counts["too_long"]) == (7, 1, 1)
    reasons = [problem.reason for problem in made.problems]
    assert "not JSON" in reasons[0]
    assert reasons[1:5] == [
        "has none of 'prompt', 'messages', 'text'",
        "'prompt' is an int, expected text or a list of messages",
        "'prompt' holds no question",
        "'messages' holds no question",
    ]
    assert made.problems[0].place == f"{questions}:line 2"
    strict = ResponseOptions((questions,), max_new_tokens=NEW, strict=True)
    with pytest.raises(CorpusError, match="line 2: not JSON"):
        make(strict, model_folder, tmp_path / "strict.jsonl")
    short = ResponseOptions((questions,), max_new_tokens=NEW, max_prompt_tokens=1)
    with pytest.raises(NoTextError, match=r"no prompt in .*5 prompts too long; 7 bad records"):
        make(short, model_folder, tmp_path / "short.jsonl")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl", "out.jsonl.origin", "q.jsonl"]


def test_empty_answers_and_special_tokens_are_left_out(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = load_tokenizer(model_folder)
    said = ["fine", "", " \n", "a <s> b", "and </s>", "<", "fine too"]
    spelled = [[*tokenizer.encode(text, bos=False).tolist()] for text in said[:5]]
    apart = tokenizer.encode("<", bos=False).tolist() + tokenizer.encode("s> x", bos=False).tolist()

    def say(_loaded: Any, rows: Sequence[Row], *_more: Any) -> list[list[int]]:
        return [
            [*spelled, apart, [0, *tokenizer.encode("fine too", bos=False).tolist()]][row.seed[1]]
            for row in rows
        ]

    monkeypatch.setattr(batches, "decode_rows", say)
    questions = write_records(tmp_path / "q.jsonl", *({"prompt": f"question {i}"} for i in range(7)))
    made = make(ResponseOptions((questions,), max_new_tokens=NEW), model_folder, tmp_path / "out.jsonl")
    outputs = {record["id"].rpartition("#")[2]: record["output"] for record in read_records(made.path)}
    # Special tokens vanish; text that would be taken for one makes an answer useless.
    assert outputs == {"1": "fine", "4": "a  b", "5": "and ", "7": "fine too"}
    assert (made.counts["empty"], made.counts["special"], made.counts["answers"]) == (2, 1, 4)


def test_nothing_but_empty_answers_is_an_error(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "decode_rows", lambda _, rows, *__: [[] for _ in rows])
    questions = write_records(tmp_path / "q.jsonl", {"prompt": "hi"})
    with pytest.raises(NoTextError, match=r"no answer for .*empty 1"):
        make(ResponseOptions((questions,)), model_folder, tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()


# --- the worker's log ---


def test_answers_of_a_log_are_taken_over_without_a_model(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(responses, "load_model", None)
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    head = {"created": "2026-01-01T12:00:00Z", "model": "small-model"}
    log = write_records(
        tmp_path / "log.jsonl",
        {"id": "1", **head, "messages": turns},
        {"id": "2", **head, "text": "prompt and answer"},
        {"id": "3", **head, "model": "another", "messages": turns},
        {"id": "4", **head, "messages": [turns[0], {"role": "assistant", "content": ""}]},
        {"id": "5", **head, "messages": turns[:1]},
        {"id": "6", **head},
        '{"id": "7", "mod',
    )
    made = make(ResponseOptions(logs=(log,)), model_folder, tmp_path / "out.jsonl.gz")
    first, second = read_records(made.path)
    assert first == {"id": "1", **head, "messages": turns, "prompt": turns[:1], "output": "ho"}
    assert second == {"id": "2", **head, "text": "prompt and answer"}
    found = {key: number for key, number in made.counts.items() if number}
    assert found == {"answers": 2, "logged": 2, "other_models": 1, "empty": 1, "bad_records": 3}
    assert stat.S_IMODE(made.path.stat().st_mode) == 0o600
    with pytest.raises(CorpusError, match="line 5: 'messages' does not end with an answer"):
        make(ResponseOptions(logs=(log,), strict=True), model_folder, tmp_path / "strict.jsonl")
    other = write_records(tmp_path / "other.jsonl", *[{"model": "x", "text": "y"}] * 7)
    with pytest.raises(NoTextError, match=r"no answer for .*other models 7"):
        make(ResponseOptions(logs=(other,)), model_folder, tmp_path / "none.jsonl")


# --- interruptions ---


class Killed(BaseException):
    """What a test ends a run with."""


def test_a_run_that_was_cut_off_goes_on_and_writes_the_same_bytes(
    model_folder: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ResponseOptions((prompts,), max_new_tokens=NEW, temperature=0.8, top_p=0.9)
    expected = make(options, model_folder, tmp_path / "a.jsonl", batch=3, dtype="float32").path.read_bytes()
    decoded: list[int] = []

    def counting(loaded: Any, rows: Sequence[Row], *more: Any) -> Any:
        if len(decoded) % 3 == 2:
            decoded.append(0)
            raise Killed
        decoded.append(len(rows))
        return decode_rows(loaded, rows, *more)

    monkeypatch.setattr(batches, "decode_rows", counting)
    out = tmp_path / "out.jsonl"
    for round_ in range(3):
        with pytest.raises(Killed):
            make(options, model_folder, out, batch=3, dtype="float32")
        assert not out.exists()
        journal = tmp_path / ".out.jsonl.partial" / "answers.jsonl"
        with journal.open("ab") as file:
            file.write([b"[[19, 0, ", b"\xff\x00\n", b'[[1, 0, "', b""][round_])
    with pytest.raises(BuildError, match=r"holds unfinished answers that differ in decoding: repeat"):
        make(ResponseOptions((prompts,), max_new_tokens=NEW), model_folder, out, dtype="float32")
    made = make(options, model_folder, out, batch=3, dtype="float32")
    assert out.read_bytes() == expected
    assert sum(decoded) == 20  # no batch twice
    assert not made.reused
    assert made.counts["answers"] == 20
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []


def test_other_settings_start_anew_if_asked_to(
    model_folder: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.jsonl"
    options, other = (ResponseOptions((prompts,), max_new_tokens=new) for new in (NEW, 5))
    first = make(options, model_folder, out)
    again = make(options, model_folder, out)
    assert (again.reused, again.counts) == (True, first.counts)
    with pytest.raises(BuildError, match="holds other answers: choose another --out, or pass --overwrite"):
        make(other, model_folder, out)
    assert make(other, model_folder, out, overwrite=True).counts["tokens"] < first.counts["tokens"]
    monkeypatch.setattr(responses, "load_model", None)
    assert make(other, model_folder, out, overwrite=True).reused
    out.write_bytes(out.read_bytes()[:-5])
    with pytest.raises(BuildError, match="holds other answers"):
        make(other, model_folder, out)
    origin_path(out).unlink()
    with pytest.raises(BuildError, match="exists and was not written by `draftstore responses`"):
        make(other, model_folder, out, overwrite=True)


def test_a_run_that_was_killed_between_publishing_and_cleaning(
    model_folder: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.jsonl"
    options = ResponseOptions((prompts,), max_new_tokens=NEW)
    with monkeypatch.context() as patch:
        patch.setattr(responses, "remove", lambda path: None)
        make(options, model_folder, out)
    assert (tmp_path / ".out.jsonl.partial").exists()
    assert make(options, model_folder, out).reused
    assert not (tmp_path / ".out.jsonl.partial").exists()


def test_another_run_at_the_same_place_is_refused(model_folder: Path, prompts: Path, tmp_path: Path) -> None:
    refused: list[str] = []
    options = ResponseOptions((prompts,), max_new_tokens=NEW)

    def meanwhile(done: int, total: int, tokens: int) -> None:
        if not refused:
            with pytest.raises(BuildError) as caught:
                make(options, model_folder, tmp_path / "out.jsonl")
            refused.append(str(caught.value))

    make(options, model_folder, tmp_path / "out.jsonl", on_progress=meanwhile)
    assert "another build is running" in refused[0]


@pytest.mark.slow
def test_killed_at_any_moment(model_folder: Path, prompts: Path, tmp_path: Path) -> None:
    options = ResponseOptions((prompts,), max_new_tokens=40)
    expected = make(options, model_folder, tmp_path / "a.jsonl", batch=2, dtype=None).path.read_bytes()
    out, moments = tmp_path / "out.jsonl", random.Random(2)
    for _ in range(8):
        moment = killed.after(moments.uniform(0, 0.1))
        if not killed.kill_when(killed.answers, (prompts, model_folder, out), moment) or out.exists():
            break
    make(options, model_folder, out, batch=2, dtype=None)
    assert out.read_bytes() == expected


# --- parts ---


def test_memory_that_does_not_suffice_halves_the_batch(
    model_folder: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ResponseOptions((prompts,), max_new_tokens=NEW)
    expected = make(options, model_folder, tmp_path / "a.jsonl", batch=16).path.read_bytes()
    sizes: list[int] = []
    fits = 4

    def small(loaded: Any, rows: Sequence[Row], *more: Any) -> Any:
        sizes.append(len(rows))
        if len(rows) > fits:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return decode_rows(loaded, rows, *more)

    monkeypatch.setattr(batches, "decode_rows", small)
    assert make(options, model_folder, tmp_path / "b.jsonl", batch=16).path.read_bytes() == expected
    assert sizes == [16, 8, 4, 4, 4, 4, 4]
    fits = 0
    with pytest.raises(ModelError, match="do not fit into the memory of cpu: use a smaller --dtype"):
        make(options, model_folder, tmp_path / "c.jsonl", batch=16)


def test_progress_counts_up(model_folder: Path, prompts: Path, tmp_path: Path) -> None:
    told: list[tuple[int, int, int]] = []
    options = ResponseOptions((prompts,), max_new_tokens=NEW)
    make(options, model_folder, tmp_path / "a.jsonl", batch=8, on_progress=lambda *seen: told.append(seen))
    assert told[0] == (0, 20, 0)
    assert told == sorted(told)
    assert told[-1][:2] == (20, 20)


def test_a_journal_keeps_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    first, second = (StoredAnswer(number, 0, "text é\n", 3, True) for number in range(2))
    with Journal(path) as journal:
        journal.add([first])
        journal.add([second])
    data = path.read_bytes()
    for cut in range(len(data) + 1):
        path.write_bytes(data[:cut])
        with Journal(path) as journal:
            kept = list(journal.answers.values())
            assert kept == [first, second][: data[:cut].count(b"\n")]
            journal.add([second])
        with Journal(path) as journal:
            assert journal.answers[1, 0] == second


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.gz", "out.jsonl.zst"])
def test_packed_as_the_name_says(model_folder: Path, prompts: Path, tmp_path: Path, name: str) -> None:
    options = ResponseOptions((prompts,), max_new_tokens=3)
    made = make(options, model_folder, tmp_path / name)
    data = made.path.read_bytes()
    assert len(read_records(made.path)) == made.counts["answers"] > 10
    (tmp_path / "more").mkdir()
    assert make(options, model_folder, tmp_path / "more" / name).path.read_bytes() == data
    if name.endswith("gz"):
        assert gzip.decompress(data).count(b"\n") == made.counts["answers"]


def test_requests_that_make_no_sense_are_refused(model_folder: Path, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    for options, place, said in (
        (ResponseOptions(), out, "no prompts and no response log"),
        (ResponseOptions((prompts,), samples=2), out, "2 samples at temperature 0 are all the same"),
        (ResponseOptions((prompts,)), tmp_path / "out.csv", "choose one that ends in .jsonl"),
        (ResponseOptions((prompts,), max_new_tokens=512), out, "512 new tokens leave no room for a prompt"),
    ):
        with pytest.raises(BuildError, match=said):
            make(options, model_folder, place)
    with pytest.raises(CorpusError, match="no such file"):
        make(ResponseOptions((tmp_path / "none.jsonl",)), model_folder, out)
    with pytest.raises(CorpusError, match="is not JSON Lines"):
        make(ResponseOptions((write_records(tmp_path / "a.txt"),)), model_folder, out)
    with pytest.raises(TokenizerError, match="a system message needs a chat"):
        make(ResponseOptions((prompts,), system="x"), model_folder, out)
    assert not os.path.lexists(tmp_path / ".out.jsonl.partial")


def test_prompts_stop_at_the_limit(model_folder: Path, prompts: Path) -> None:
    tokenizer = load_tokenizer(model_folder)
    found, report = read_prompts([prompts, prompts], tokenizer, Asking())
    assert (len(found), report.documents, report.repeated) == (20, 20, 20)
    assert [prompt.id for prompt in found[:2]] == ["prompts.jsonl#1", "prompts.jsonl#2"]
    assert [prompt.tokens for prompt in found] == [
        len(encode_conversation(tokenizer, p.content)) for p in found
    ]
    assert len(read_prompts([prompts], tokenizer, Asking(limit=3))[0]) == 3
