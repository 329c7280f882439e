"""The decoding worker under many clients at once, with a real model: each gets its own answer, and nothing is left."""

import http.client
import itertools
import json
import random
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from draftstore.stores.rest.build import RestOptions, build_rest
from draftstore.text.tokenizer import load_tokenizer
from tests.fakes.served import Service
from tests.fakes.waiting import SECONDS, until
from tests.fakes.workers import served_worker

pytest.importorskip("torch")

CLIENTS = 32
TOKENS = 24
TALE = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. "
PROMPTS = (
    "Once upon a time",
    "Tom and Lily went to the park.",
    "The cat said",
    "One day, a big",
    TALE,
    "Mom",
)
GREEDY = {"temperature": 0, "max_tokens": TOKENS}
SETTINGS: tuple[dict[str, Any], ...] = (
    GREEDY,
    {"temperature": 0.9, "seed": 7, "max_tokens": TOKENS},
    {"temperature": 1.2, "top_p": 0.9, "seed": 8, "frequency_penalty": 0.5, "max_tokens": TOKENS + 9},
    {"temperature": 1.0, "seed": 20, "n": 3, "max_tokens": TOKENS // 2},
    {**GREEDY, "draftstore": {"budget": 0}},
    {**GREEDY, "prediction": {"type": "content", "content": TALE}},
    {**GREEDY, "min_tokens": TOKENS, "repetition_penalty": 1.3},
)
ASKED = [{"prompt": prompt, **settings} for prompt, settings in itertools.product(PROMPTS, SETTINGS)]
TOO_LONG = {"prompt": [5] * 600, "max_tokens": 5}
GROWTH = 6e6
"""Bytes that a round may add to the worker. What a round leaves behind where nothing is freed is more: the drafts of a
text take at least 150 kB, its tokens and tensors come on top, and there are about 60 of them. Allocators keep less."""


@pytest.fixture(scope="module")
def service(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Run a worker in float64, where a batch computes the very numbers that a text alone has."""
    folder = tmp_path_factory.mktemp("worker")
    model = data / "models" / "stories260K"
    (folder / "tales.jsonl").write_text(json.dumps({"text": TALE * 3}) + "\n")
    build_rest(
        RestOptions(corpus=(folder / "tales.jsonl",), name="tales"),
        load_tokenizer(model),
        folder / "store",
        workers=1,
    )
    options = (
        "--model",
        model,
        "--device",
        "cpu",
        "--dtype",
        "float64",
        "--max-batch",
        8,
        "--queue",
        CLIENTS,
    )
    with served_worker(
        *options, "--store", folder / "store", "--recycling", "--budget", 8, "--fixed-budget", folder=folder
    ) as service:
        yield service


def begin(service: Service, asked: dict[str, Any]) -> http.client.HTTPConnection:
    """Send a request, and read nothing yet."""
    connection = http.client.HTTPConnection(service.started["url"].removeprefix("http://"), timeout=SECONDS)
    connection.request("POST", "/v1/completions", json.dumps(asked), {"Content-Type": "application/json"})
    return connection


def texts_of(service: Service, asked: dict[str, Any]) -> list[str]:
    """Return the answers of a whole reply."""
    status, body = service.request("POST", "/v1/completions", asked)
    assert status == 200, body
    return [choice["text"] for choice in json.loads(body)["choices"]]


class Client:
    """One client of a round: what it asks, and how it behaves."""

    def __init__(self, service: Service, asked: dict[str, Any], expected: list[str]) -> None:
        self._service, self._asked, self._expected = service, asked, expected
        self.answers = len(expected)

    def read_whole(self) -> str:
        """Read the answer at once."""
        assert texts_of(self._service, self._asked) == self._expected, self._asked
        return "answered"

    def read_stream(self) -> str:
        """Read the answer as it comes."""
        assert self._read(1 << 20) == self._expected, self._asked
        return "answered"

    def hang_up(self) -> str:
        """Go away in mid-stream, after some pieces."""
        found = self._read(1 + len(self._asked["prompt"]) % 4)
        for text, expected in zip(found, self._expected, strict=True):
            assert expected.startswith(text), self._asked
        return "gone"

    def change_mind(self) -> str:
        """Go away before anything was answered, but after the request was read: the worker reads in order."""
        connection = begin(self._service, self._asked)
        self._service.get("/healthz")
        connection.close()
        return "gone"

    def ask_too_much(self) -> str:
        """Send a prompt that is longer than the model's positions."""
        status, body = self._service.request("POST", "/v1/completions", TOO_LONG)
        assert (status, json.loads(body)["error"]["code"]) == (400, "context_length_exceeded")
        return "refused"

    def _read(self, most: int) -> list[str]:
        """Return the texts of the first events of a stream."""
        connection = begin(self._service, {**self._asked, "stream": True})
        try:
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()
            texts = [""] * len(self._expected)
            lines = (line.removeprefix(b"data: ") for line in answer if line.startswith(b"data: {"))
            for line in itertools.islice(lines, most):
                for choice in json.loads(line)["choices"]:
                    texts[choice["index"]] += choice["text"]
            return texts
        finally:
            connection.close()


MANNERS = (
    Client.read_whole, Client.read_stream, Client.read_stream, Client.hang_up, Client.change_mind, Client.ask_too_much,
)  # fmt: skip


def ended(service: Service) -> Counter[str]:
    """Return how many answers ended for which reason, and how many requests were refused."""
    samples = service.samples()
    found = Counter(refused=int(samples["draftstore_decoding_requests_refused_total", ()]))
    for (name, labels), value in samples.items():
        if name == "vllm:request_success_total":
            found[dict(labels)["finished_reason"]] += int(value)
    return found


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
        draw, before = random.Random(turn), ended(service)
        places = draw.sample(range(len(ASKED)), CLIENTS)
        clients = [Client(service, ASKED[place], alone[place]) for place in places]
        manners = draw.sample(MANNERS * (CLIENTS // len(MANNERS) + 1), CLIENTS)
        with ThreadPoolExecutor(CLIENTS) as threads:
            ends = Counter(threads.map(lambda client, manner: manner(client), clients, manners))
        until(lambda: is_idle(service))
        found = ended(service) - before
        assert found["error"] == 0
        assert found["refused"] == ends["refused"]
        answers = sum(
            client.answers
            for client, manner in zip(clients, manners, strict=True)
            if manner is not Client.ask_too_much
        )
        assert found["stop"] + found["length"] + found["abort"] == answers
        sizes.append(process.memory_info().rss)
    assert sizes[2] - sizes[1] < GROWTH, sizes
    assert texts_of(service, ASKED[0]) == alone[0]
    assert service.stop() == 0
