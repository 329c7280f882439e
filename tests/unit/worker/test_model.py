"""The decoding worker with a real model: its answers equal those of transformers alone."""

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from draftstore.assembly.sources import Sources
from draftstore.decoding.curve import CostCurve
from draftstore.errors import DraftstoreError
from draftstore.hf.loading import ModelOptions
from draftstore.hf.planning import Effort
from draftstore.live.store import LiveTarget
from draftstore.stores.rest.build import RestOptions, build_rest
from draftstore.text.tokenizer import TextTokenizer, load_tokenizer
from services.worker.settings import WorkerSettings
from tests.fakes.dense_stores import make_dense_store, make_projection
from tests.fakes.lookups import serving
from tests.fakes.served import Service
from tests.fakes.workers import read_stream, running_worker, served_worker, text_of

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

PROMPTS = ["Once upon a time", "Tom and Lily went to the park.", "The cat 東京", " said", "One day, Tom"]
TALE = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. "


@pytest.fixture(scope="module")
def stories(data: Path) -> Path:
    return data / "models" / "stories260K"


@pytest.fixture(scope="module")
def tokenizer(stories: Path) -> TextTokenizer:
    return load_tokenizer(stories)


@pytest.fixture(scope="module")
def model(stories: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(stories, dtype="float64").eval()


@pytest.fixture(scope="module")
def service(
    stories: Path, tokenizer: TextTokenizer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    """Return a running `draftstore worker` that drafts from a store, the request and recycled candidates."""
    folder = tmp_path_factory.mktemp("worker")
    (folder / "tales.jsonl").write_text(json.dumps({"text": TALE * 3}) + "\n")
    build_rest(
        RestOptions(corpus=(folder / "tales.jsonl",), name="tales"), tokenizer, folder / "store", workers=1
    )
    make_dense_store(
        folder / "dense",
        [tokenizer.encode(TALE, bos=True).tolist()],
        projection=make_projection(hidden_size=64),
        target_model="stories260K",
        tokenizer=tokenizer,
    )
    sources = ("--store", folder / "store", "--store", folder / "dense", "--recycling")
    arguments = ("--model", stories, "--dtype", "float64", *sources)
    with served_worker(*arguments, "--budget", "12", "--fixed-budget", folder=folder) as service:
        yield service


def ask(service: Service, path: str, **asked: Any) -> dict[str, Any]:
    status, body = service.request("POST", f"/v1/{path}", asked)
    assert status == 200, body
    reply: dict[str, Any] = json.loads(body)
    return reply


def speculation(reply: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of drafts as vLLM writes them."""
    found: dict[str, Any] = reply["metrics"]["speculative_decoding"]
    return found


def stream(service: Service, path: str, **asked: Any) -> str:
    with closing(service.begin("POST", f"/v1/{path}", {**asked, "stream": True})) as connection:
        return text_of(read_stream(connection.getresponse()))


def answer_ids(model: Any, tokenizer: TextTokenizer, prompt: str, tokens: int, **options: Any) -> list[int]:
    """Return what the model says without drafts, by transformers alone."""
    ids = torch.from_numpy(tokenizer.encode(prompt, bos=True)).to(torch.int64)[None]
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, **options)
    generated: list[int] = output[0, ids.shape[1] :].tolist()
    return generated


def text_after(tokenizer: TextTokenizer, prompt: str, generated: list[int]) -> str:
    """Return the text that tokens add to a prompt."""
    ids = [
        token for token in tokenizer.encode(prompt, bos=True).tolist() if token not in tokenizer.special_ids
    ]
    whole = tokenizer.decode([*ids, *(token for token in generated if token not in tokenizer.special_ids)])
    return whole[len(tokenizer.decode(ids)) :].rstrip("\ufffd")


def plain(model: Any, tokenizer: TextTokenizer, prompt: str, tokens: int, **options: Any) -> str:
    """Return the text of that."""
    return text_after(
        tokenizer, prompt, answer_ids(model, tokenizer, prompt, tokens, **{"do_sample": False, **options})
    )


@pytest.mark.parametrize("prompt", PROMPTS[:3])
def test_greedy_answers_are_those_of_plain_generate(
    service: Service, model: Any, tokenizer: TextTokenizer, prompt: str
) -> None:
    asked = {"prompt": prompt, "max_tokens": 100, "temperature": 0}
    reply = ask(service, "completions", **asked)
    expected = plain(model, tokenizer, prompt, 100)
    assert reply["choices"][0]["text"] == expected
    assert stream(service, "completions", **asked) == expected
    stop = expected[40:44]
    assert (
        ask(service, "completions", **asked, stop=stop)["choices"][0]["text"]
        == expected[: expected.index(stop)]
    )
    figures = speculation(reply)
    passes = reply["usage"]["draftstore"]["passes"]
    assert passes + figures["num_accepted_draft_tokens"] == reply["usage"]["completion_tokens"] - 1
    assert figures["num_draft_tokens"] >= figures["num_accepted_draft_tokens"]


def test_sampled_answers_are_those_of_plain_generate_with_the_same_seed(
    service: Service, model: Any, tokenizer: TextTokenizer
) -> None:
    chosen = {"temperature": 0.8, "top_p": 0.95}
    asked = {"prompt": PROMPTS[0], "max_tokens": 60, "seed": 5, **chosen}
    texts = [ask(service, "completions", **asked)["choices"][0]["text"] for _ in range(2)]
    torch.manual_seed(5)
    expected = plain(model, tokenizer, PROMPTS[0], 60, do_sample=True, top_k=0, **chosen)
    assert texts == [expected, expected]
    assert stream(service, "completions", **asked) == expected
    others = {
        ask(service, "completions", **{**asked, "seed": seed})["choices"][0]["text"] for seed in range(3)
    }
    assert len(others) == 3


@pytest.mark.parametrize(
    ("given", "seconds", "waits"), [(None, 0.1, 0.01), (None, 1e-3, 2e-3), (0.5, 0.1, 0.5)]
)
def test_a_step_waits_a_tenth_of_a_measured_pass_for_the_lookup_service(
    given: float | None, seconds: float, waits: float, stories: Path, tmp_path: Path
) -> None:
    from services.worker.model import BatchEngine, load_engine

    CostCurve((1, 2), (seconds, 2 * seconds)).save(tmp_path / "curve.json")
    with serving({}, live=[LiveTarget("team")]) as running:
        sources = Sources(lookup=f"unix:{running.socket}", live=LiveTarget("team"), deadline=given)
        effort = Effort(curve=tmp_path / "curve.json")
        engine = load_engine(ModelOptions(model=str(stories)), sources, effort, WorkerSettings())
        assert isinstance(engine, BatchEngine)
        store = engine._drafters.parts[-1].drafter.store  # type: ignore[attr-defined]
        assert store.deadline == pytest.approx(waits)
        engine.close()


def test_the_log_tells_what_a_start_waits_for(
    stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from services.worker import model

    monkeypatch.setattr(model, "LOOKUP_WAIT_SECONDS", 1.5)
    sources = Sources(lookup=f"unix:{tmp_path}/none.sock", release="code")
    with caplog.at_level("INFO"), pytest.raises(DraftstoreError):
        model.load_engine(ModelOptions(model=str(stories)), sources, Effort(), WorkerSettings())
    kernels, warning = (record.getMessage() for record in caplog.records[1:])  # after the model
    assert "the first start after an install compiles them" in kernels
    assert "trying again" in warning, "one for several attempts"


def test_a_request_without_drafts(service: Service) -> None:
    asked = {"prompt": TALE, "max_tokens": 40, "temperature": 0}
    drafted, without = (
        ask(service, "completions", **asked, draftstore=given) for given in ({}, {"budget": 0})
    )
    assert without["choices"] == drafted["choices"]
    assert speculation(drafted)["num_draft_tokens"] > 0
    assert speculation(without)["acceptance_histogram"] == [0]
    assert without["usage"]["draftstore"]["accepted_length"] == 1.0
    accepted = speculation(drafted)["num_accepted_draft_tokens"]
    assert (
        service.metric("vllm:spec_decode_num_accepted_tokens_total", model_name="stories260K") >= accepted > 0
    )
    sources = drafted["usage"]["draftstore"]["sources"]
    assert [*sources] == ["request", "rest:tales", "dresd:dense", "recycling"]
    assert sources["rest:tales"]["drafted"] > sources["rest:tales"]["matched"] > 0
    passes = without["usage"]["draftstore"]["passes"]
    assert {str(each) for each in without["usage"]["draftstore"]["sources"].values()} == {
        str({"drafted": 0, "matched": 0, "empty": {"budget": passes}})
    }
    few = speculation(ask(service, "completions", **asked, draftstore={"budget": 2}))
    assert 0 < few["num_draft_tokens"] <= 2 * few["num_spec_steps"]


def test_a_prediction_changes_nothing_but_the_passes(service: Service) -> None:
    """Sampled at such a temperature, the answer is one that nothing else foretells."""
    asked = {"prompt": PROMPTS[2], "max_tokens": 60, "temperature": 1.5, "seed": 3}

    def predicted(content: str) -> dict[str, Any]:
        return ask(service, "completions", **asked, prediction={"type": "content", "content": content})

    plain_reply = ask(service, "completions", **asked)
    text = plain_reply["choices"][0]["text"]
    right, wrong, nothing = predicted(text), predicted(TALE), predicted("")
    for reply in (right, wrong, nothing):
        assert reply["choices"] == plain_reply["choices"]
    lengths = [
        reply["usage"]["draftstore"]["accepted_length"] for reply in (plain_reply, right, wrong, nothing)
    ]
    assert lengths[1] > 3 > 2 > max(lengths[0], *lengths[2:])
    details = [reply["usage"]["completion_tokens_details"] for reply in (plain_reply, right, nothing)]
    assert details[1]["accepted_prediction_tokens"] > 20
    assert all(
        each["accepted_prediction_tokens"] == each["rejected_prediction_tokens"] == 0 for each in details[::2]
    )


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1.5, "top_p": 0.9, "seed": 3}])
def test_drafting_forced_tokens_does_not_change_an_answer_in_json(
    service: Service, sampling: dict[str, Any]
) -> None:
    properties = {
        "favourite_colour": {"enum": ["red", "green"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    }
    schema = {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "child", "schema": schema, "strict": True}}
    asked = {"prompt": PROMPTS[1], "max_tokens": 100, "response_format": wanted, **sampling}
    drafted, without = (
        ask(service, "completions", **asked, draftstore=given) for given in ({}, {"budget": 0})
    )
    assert drafted["choices"] == without["choices"]
    answer = drafted["choices"][0]
    assert answer["finish_reason"] == "stop"
    found = json.loads(answer["text"])
    assert [*found] == [*properties]
    assert found["favourite_colour"] in ("red", "green")
    assert isinstance(found["age"], int)
    assert drafted["usage"]["draftstore"]["sources"]["grammar"]["matched"] >= 20
    assert drafted["usage"]["draftstore"]["passes"] < without["usage"]["draftstore"]["passes"] / 2
    assert stream(service, "completions", **asked) == answer["text"]


def test_a_model_with_stop_strings_of_its_own(
    stories: Path, model: Any, tokenizer: TextTokenizer, tmp_path: Path
) -> None:
    import shutil

    from services.worker.model import load_engine

    folder = shutil.copytree(stories, tmp_path / "own")
    own = transformers.GenerationConfig.from_pretrained(stories)
    own.update(stop_strings=["girl"], num_return_sequences=2, do_sample=True)
    own.save_pretrained(folder)
    options = ModelOptions(model=str(folder), dtype="float64", device="cpu")
    with running_worker(load_engine(options, Sources(), Effort(), WorkerSettings())) as worker:
        _, reply = worker.ask("completions", prompt=PROMPTS[0], max_tokens=40, temperature=0)
    [choice], expected = reply["choices"], plain(model, tokenizer, PROMPTS[0], 40)
    assert (choice["text"], choice["finish_reason"]) == (expected[: expected.index("girl")], "stop")


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (
            "unsupported_reason",
            r"LlamaForCausalLM reads backwards, so it takes no drafts: call model\.generate",
        ),
        ("forward", r"LlamaForCausalLM cannot be decoded at all: .*list index out of range"),
        ("step", r"cannot be decoded \(IndexError: list index out of range\): check its files"),
    ],
)
def test_models_that_take_no_drafts_are_not_served(
    stories: Path, monkeypatch: pytest.MonkeyPatch, part: str, message: str
) -> None:
    from draftstore.hf import exactness
    from draftstore.hf.batches import Batch
    from services.worker.model import load_engine

    def fail(*_: Any, **__: Any) -> None:
        raise IndexError("list index out of range")

    if part == "unsupported_reason":
        monkeypatch.setattr(exactness, "unsupported_reason", lambda _model: "reads backwards")
    else:
        broken: Any = {"forward": transformers.LlamaForCausalLM, "step": Batch}[part]
        monkeypatch.setattr(broken, part, fail)
    options = ModelOptions(model=str(stories), device="cpu")
    with pytest.raises(DraftstoreError, match=message):
        load_engine(options, Sources(), Effort(), WorkerSettings())
