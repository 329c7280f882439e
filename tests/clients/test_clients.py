"""Benchmark clients, run with the commands of docs/measure.md against a real worker with drafts."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import openai
import pytest

from draftstore.stores.rest.build import RestOptions, build_rest
from draftstore.text.tokenizer import load_tokenizer
from tests import ROOT
from tests.fakes.served import Service
from tests.fakes.waiting import until
from tests.fakes.workers import served_worker

pytestmark = pytest.mark.slow  # minutes, where the environment is there

SECONDS = 400
NAME, REQUESTS, TOKENS = "model", 12, 64
BIN = ROOT / ".venv-clients" / "bin"
PAGE = (ROOT / "docs" / "measure.md").read_text()
COMMANDS = re.findall(r"^```sh\n(.+?)^```", PAGE, re.MULTILINE | re.DOTALL)
TALE = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. "
TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"
BEGINNINGS = ("Once upon a time, there was", "One day, in the park, there was", "Mom was very happy with")
CHATS = [
    [start, "Yes.", f"Tell me of {name}"] for start in BEGINNINGS for name in ("Lily", "Tom", "a dog", "Ben")
]


class Drafts(NamedTuple):
    """Figures of passes that verified a draft."""

    steps: float
    drafted: float
    accepted: float

    @property
    def length(self) -> float:
        return 1 + self.accepted / self.steps


@pytest.fixture(scope="module")
def folder(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with model, store and conversations, the last turn the assistant's."""
    folder = tmp_path_factory.mktemp("clients")
    shutil.copytree(data / "models" / "stories260K", folder / NAME)
    (folder / NAME / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "tales.jsonl").write_text(json.dumps({"text": TALE * 3}) + "\n")
    tales = RestOptions(corpus=(folder / "tales.jsonl",), name="tales")
    build_rest(tales, load_tokenizer(folder / NAME), folder / "store", workers=1)
    roles = ("user", "assistant", "user", "assistant")
    with (folder / "chats.jsonl").open("w") as lines:
        for chat in CHATS:
            turns = zip(roles, [*chat, "Not this."], strict=True)
            chat_lines = [{"role": role, "content": content} for role, content in turns]
            lines.write(json.dumps({"messages": chat_lines}) + "\n")
    return folder


@pytest.fixture(scope="module")
def service(folder: Path) -> Iterator[Service]:
    options = ("--model", folder / NAME, "--device", "cpu", "--store", folder / "store")
    with served_worker(*options, folder=folder) as service:
        yield service


def run(program: str, service: Service, folder: Path) -> str:
    """Run the command of a program as the page has it; return what it prints."""
    [command] = [each for each in COMMANDS if each.startswith(f"{program} ")]
    settings = {"URL": service.started["url"], "MODEL": NAME, "TOKENIZER": NAME}
    settings |= {"REQUESTS": str(REQUESTS), "TOKENS": str(TOKENS), "PATH": f"{BIN}:{os.environ['PATH']}"}
    if program != "aiperf":  # which takes no folder then
        settings["HF_HUB_OFFLINE"] = "1"
    command = command.replace("vllm bench serve", f"python {ROOT / 'tests' / 'clients' / 'vllm_bench.py'}")
    done = subprocess.run(
        ["bash", "-ec", command], cwd=folder, env=os.environ | settings, text=True, timeout=SECONDS,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:]
    return done.stdout


@pytest.fixture(scope="module")
def prompts(service: Service, folder: Path) -> Path:
    """Return the folder, with the input of every client."""
    run("python", service, folder)
    assert "Not this." not in (folder / "vllm.jsonl").read_text()
    return folder


def counted(service: Service) -> Drafts:
    """Return the figures of the worker, once it is idle."""
    names = "vllm:num_requests_running", "vllm:num_requests_waiting"
    until(lambda: not any(service.metric(name, model_name=NAME) for name in names))
    kinds = "drafts", "draft_tokens", "accepted_tokens"
    return Drafts(*(service.metric(f"vllm:spec_decode_num_{kind}_total", model_name=NAME) for kind in kinds))


def since(service: Service, before: Drafts) -> Drafts:
    return Drafts(*(after - then for after, then in zip(counted(service), before, strict=True)))


def test_aiperf(service: Service, prompts: Path) -> None:
    before = counted(service)
    printed = run("aiperf", service, prompts)
    found = json.loads((prompts / "aiperf" / "profile_export_aiperf.json").read_text())
    assert found["request_count"]["avg"] == REQUESTS
    assert found["request_error_rate"]["avg"] == 0
    total = {
        name: found[f"total_{name}"]["avg"]
        for name in ("spec_decode_steps", "draft_tokens", "accepted_draft_tokens")
    }
    assert Drafts(*total.values()) == since(service, before)
    assert found["spec_decode_token_weighted_acceptance_length"]["avg"] == pytest.approx(
        Drafts(*total.values()).length
    )
    assert found["spec_decode_acceptance_length"]["min"] > 1
    section = printed[printed.index("LLM Metrics: Spec Decode") :]
    print(section[: section.index("Accepted drafts per step")])


def test_vllm_bench(service: Service, prompts: Path) -> None:
    before = counted(service)
    printed = run("vllm", service, prompts)
    found = json.loads((prompts / "vllm.json").read_text())
    assert (found["completed"], found["failed"]) == (REQUESTS, 0)
    assert found["total_output_tokens"] == REQUESTS * TOKENS
    names = "num_drafts", "draft_tokens", "accepted_tokens"
    shown = Drafts(*(found[f"spec_decode_{name}"] for name in names))
    assert shown == since(service, before)
    assert 1 < found["spec_decode_acceptance_length"] == pytest.approx(shown.length)
    print(printed[printed.index("Successful requests") :].split("Per-position")[0])


def test_guidellm(service: Service, prompts: Path) -> None:
    before = counted(service)
    run("guidellm", service, prompts)
    [found] = json.loads((prompts / "guidellm.json").read_text())["benchmarks"]
    totals = found["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"], totals["incomplete"]) == (REQUESTS, 0, 0)
    pieces = found["metrics"]["output_tokens_per_iteration"]["successful"]["mean"]
    assert 1 < pieces < since(service, before).length
    print(f"tokens a piece: {pieces:.2f}")


def test_the_client_of_openai(service: Service) -> None:
    chat: Any = [{"role": "user", "content": "Once upon a time, there was"}]
    asked: Any = {"model": NAME, "messages": chat, "temperature": 0, "max_completion_tokens": TOKENS}
    with openai.OpenAI(base_url=f"{service.started['url']}/v1", api_key="none", max_retries=0) as client:
        whole: Any = client.chat.completions.create(**asked)
        stream = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
        chunks = list(stream)
        text = whole.choices[0].message.content
        predicted: Any = client.chat.completions.create(
            **asked, prediction={"type": "content", "content": text}
        )
    assert "".join(each.choices[0].delta.content or "" for each in chunks if each.choices) == text
    assert predicted.choices[0].message.content == text
    assert predicted.usage.completion_tokens_details.accepted_prediction_tokens > 0
    lengths = [
        each.metrics["speculative_decoding"]["mean_acceptance_length"]
        for each in (whole, chunks[-1], predicted)
    ]
    assert 1 < lengths[0] == lengths[1] < lengths[2]
    print(f"acceptance length: whole and streamed {lengths[0]:.2f}, with the prediction {lengths[2]:.2f}")
