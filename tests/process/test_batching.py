"""The decoding worker under many concurrent clients, with a real model: each gets its answer, and nothing leaks."""

import itertools
import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from draftstore.stores.rest.build import RestOptions, build_rest
from draftstore.text.tokenizer import load_tokenizer
from tests.fakes.served import Service
from tests.fakes.waiting import until
from tests.fakes.workers import served_worker

pytest.importorskip("torch")

CLIENTS = 32
PATH = "/v1/completions"
TOKENS = 24
TALE = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. "
PROMPTS = ("Once upon a time", "Tom and Lily went to the park.", "One day, a big", TALE)
GREEDY = {"temperature": 0, "max_tokens": TOKENS}
SETTINGS: tuple[dict[str, Any], ...] = (
    GREEDY,
    {"temperature": 1.2, "top_p": 0.9, "seed": 8, "frequency_penalty": 0.5, "max_tokens": TOKENS + 9},
    {"temperature": 1.0, "seed": 20, "n": 3, "max_tokens": TOKENS // 2},
    {**GREEDY, "prediction": {"type": "content", "content": TALE}},
)
ASKED = [{"prompt": prompt, **settings} for prompt, settings in itertools.product(PROMPTS, SETTINGS)]
MANNERS = ("reads a stream", "hangs up", "changes its mind")
GROWTH = 6e6
"""Bytes that a round may add to the worker. What a round leaves behind where nothing is freed is more: the drafts of a
text take at least 150 kB, its tokens and tensors come on top, and there are about 60 of them. Allocators keep less."""


@pytest.fixture(scope="module")
def service(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Run a worker in float64, where a batch computes the very numbers that a text alone has."""
    folder = tmp_path_factory.mktemp("worker")
    model = data / "models" / "stories260K"
    (folder / "tales.jsonl").write_text(json.dumps({"text": TALE * 3}) + "\n")
    tales = RestOptions(corpus=(folder / "tales.jsonl",), name="tales")
    build_rest(tales, load_tokenizer(model), folder / "store", workers=1)
    options = ("--model", model, "--device", "cpu", "--dtype", "float64")
    queue = ("--max-batch", 8, "--queue", CLIENTS)
    drafts = ("--store", folder / "store", "--recycling", "--budget", 8, "--fixed-budget")
    with served_worker(*options, *queue, *drafts, folder=folder) as service:
        yield service


def texts_of(service: Service, asked: dict[str, Any]) -> list[str]:
    """Return the answers of a whole reply."""
    status, body = service.request("POST", PATH, asked)
    assert status == 200, body
    return [choice["text"] for choice in json.loads(body)["choices"]]


def read_stream(service: Service, asked: dict[str, Any], events: int) -> list[str]:
    """Return the texts of the first events of a stream, and hang up."""
    with closing(service.begin("POST", PATH, {**asked, "stream": True})) as connection:
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        texts = [""] * asked.get("n", 1)
        lines = (line.removeprefix(b"data: ") for line in answer if line.startswith(b"data: {"))
        for line in itertools.islice(lines, events):
            for choice in json.loads(line)["choices"]:
                texts[choice["index"]] += choice["text"]
        return texts


def ask(service: Service, asked: dict[str, Any], manner: str, expected: list[str]) -> None:
    """Be one client: each gets its own answer, as far as it reads."""
    if manner == "changes its mind":
        with closing(service.begin("POST", PATH, asked)):
            service.get("/healthz")  # by then the request was read: the worker reads in order
        return
    leaves = manner == "hangs up"
    found = read_stream(service, asked, 1 + len(asked["prompt"]) % 4 if leaves else 1 << 20)
    assert leaves or found == expected, asked
    assert all(whole.startswith(text) for text, whole in zip(found, expected, strict=True)), asked


def is_idle(service: Service) -> bool:
    names = "vllm:num_requests_running", "vllm:num_requests_waiting"
    return not any(service.metric(name, model_name=service.started["model"]) for name in names)


@pytest.mark.slow
def test_many_clients_at_once(service: Service) -> None:
    alone = [texts_of(service, {**asked, "draftstore": {"budget": 0}}) for asked in ASKED]
    assert len({text for texts in alone for text in texts}) > len(ASKED) // 2
    process = psutil.Process(service.process.pid)
    sizes = []
    for turn in range(3):
        draw = random.Random(turn)
        places = [draw.randrange(len(ASKED)) for _ in range(CLIENTS)]
        with ThreadPoolExecutor(CLIENTS) as threads:
            calls = [
                threads.submit(ask, service, ASKED[place], MANNERS[number % 3], alone[place])
                for number, place in enumerate(places)
            ]
        for call in calls:
            call.result()
        until(lambda: is_idle(service))
        sizes.append(process.memory_info().rss)
    assert sizes[2] - sizes[1] < GROWTH, sizes
    assert texts_of(service, ASKED[0]) == alone[0]
    assert service.stop() == 0
