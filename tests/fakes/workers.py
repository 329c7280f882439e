"""Running decoding workers for tests: a model that says what it is told to, the HTTP side around it, a plain client.

with running_worker(FakeEngine(tokenizer, " one two")) as worker:
    status, reply = worker.ask("completions", prompt="zero", max_tokens=8)
"""

import asyncio
import http.client
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import numpy as np
from starlette.datastructures import Headers

from draftstore.cli.common import print_json
from draftstore.decoding.loop import Step
from draftstore.errors import DraftstoreError
from draftstore.hf.requests import GenerationRequest, Likelihood
from draftstore.text.tokenizer import TextTokenizer, load_tokenizer
from draftstore.trees.tree import DraftTree
from services.cli.options import access_options
from services.common.addresses import ListenAddress
from services.common.http_server import HttpServer
from services.common.permissions import Grant, Permissions
from services.worker import running
from services.worker.app import WorkerSite, make_app
from services.worker.decoder import Decoder
from services.worker.figures import WorkerMetrics
from services.worker.response_log import ResponseLog
from services.worker.settings import WorkerSettings
from services.worker.work import Answer, Facts
from tests import ROOT
from tests.fakes.served import Samples, Service, read_samples, started
from tests.fakes.sites import Loop
from tests.fakes.waiting import SECONDS, until

MODEL = "small"


def chain(tokens: Sequence[int]) -> DraftTree:
    """Return a draft of one path."""
    size = len(tokens)
    return DraftTree(
        np.array(tokens, np.int32), np.arange(-1, size - 1, dtype=np.int16), np.zeros(size, np.uint8)
    )


def likelihood(token: int, top: int) -> Likelihood:
    """Return how likely a fake token is: less than the one behind it."""
    return Likelihood(token, -1.5, ((token + 1, -0.5), (token, -1.5), (0, float("-inf")))[:top])


class FakeEngine:
    """A model that says what it is told to, several tokens a pass.

    Attributes:
        works: what it was asked for.
        gate: where set, each forward pass waits for it.
        last_pass: answers of the last step, half of whose columns it says to have filled.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        answer: str | Callable[[GenerationRequest], Sequence[int]] = " one two three",
        *,
        chunk: int = 1,
        positions: int = 512,
        most: int = 1,
    ) -> None:
        assert tokenizer.eos_id is not None
        self.tokenizer = tokenizer
        self.facts = Facts(
            MODEL, positions, tokenizer.vocab_size, frozenset([tokenizer.eos_id]), ("request",), "stories"
        )
        self.works: list[GenerationRequest] = []
        self.gate: threading.Semaphore | None = None
        self.closed = False
        self.most = most
        self.last_pass: tuple[int, float] | None = None
        self._chunk = chunk
        self._answer = answer
        self._answers: dict[Answer, Iterator[Step]] = {}

    def tokens_of(self, work: GenerationRequest) -> list[int]:
        """Return what it says, cut where transformers would cut it."""
        if callable(self._answer):
            tokens = list(self._answer(work))
        else:
            ids = self.tokenizer.encode(self._answer, bos=False).tolist()
            tokens = [*ids, *self.facts.ends]
        return tokens[: work.max_tokens]

    @property
    def room(self) -> int:
        return self.most - len(self._answers)

    def join(self, answer: Answer) -> None:
        self._answers[answer] = self.passes(answer.request)
        self.works.append(answer.request)  # last: who waits for it finds the room taken

    def leave(self, answer: Answer) -> None:
        self._answers.pop(answer, None)

    def passes(self, work: GenerationRequest) -> Iterator[Step]:
        """Yield the passes of an answer."""
        tokens = self.tokens_of(work)
        for start in [0, *range(1, len(tokens), self._chunk)]:
            if self.gate:
                assert self.gate.acquire(timeout=SECONDS)
            come = tokens[start : start + self._chunk] if start else tokens[:1]
            tree = chain(come[:-1])
            yield Step(tree, list(range(len(tree))), np.array(come, np.int32), 1, 1, 1)

    def step(self) -> list[tuple[Answer, Exception | None]]:
        ended: list[tuple[Answer, Exception | None]] = []
        self.last_pass = len(self._answers), 0.5
        for answer, passes in list(self._answers.items()):
            try:
                step, top = next(passes), answer.request.top
                answer.take(
                    step, [likelihood(token, top) for token in step.tokens] if top is not None else []
                )
            except StopIteration:
                ended.append((answer, None))
            except Exception as error:  # noqa: BLE001 (that is how an answer ends)
                ended.append((answer, error))
        for answer, _ in ended:
            self.leave(answer)
        return ended

    def close(self) -> None:
        self.closed = True


class Worker:
    """A worker with its HTTP side, in threads of this process."""

    def __init__(self, decoder: Decoder, address: tuple[str, int], site: WorkerSite) -> None:
        self.decoder = decoder
        self.address = address
        self.site = site

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(*self.address, timeout=SECONDS)

    def request(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, Headers, bytes]:
        """Send a request; return status, headers and body."""
        connection = self.connect()
        try:
            connection.request(method, path, body, {"Content-Type": "application/json", **(headers or {})})
            answer = connection.getresponse()
            return answer.status, Headers(dict(answer.getheaders())), answer.read()
        finally:
            connection.close()

    def ask(self, what: str, headers: Mapping[str, str] | None = None, **asked: Any) -> tuple[int, Any]:
        """Ask for a completion or a chat; return status and document."""
        path = "/v1/chat/completions" if what == "chat" else "/v1/completions"
        status, _, body = self.request("POST", path, json.dumps(asked).encode(), headers)
        return status, json.loads(body)

    def begin(self, what: str = "completions", **asked: Any) -> http.client.HTTPConnection:
        """Send a request, and read nothing yet."""
        connection = self.connect()
        path = "/v1/chat/completions" if what == "chat" else "/v1/completions"
        connection.request("POST", path, json.dumps(asked).encode(), {"Content-Type": "application/json"})
        return connection

    def stream(self, what: str, **asked: Any) -> list[dict[str, Any]]:
        """Return the events of a stream, which ends as it should."""
        connection = self.begin(what, stream=True, **asked)
        try:
            return read_stream(connection.getresponse())
        finally:
            connection.close()

    def samples(self) -> Samples:
        """Return all metrics by name and labels."""
        status, _, body = self.request("GET", "/metrics")
        assert status == 200, body
        return read_samples(body)

    def metric(self, name: str, **labels: str) -> float:
        return self.samples()[f"draftstore_decoding_{name}", tuple(sorted(labels.items()))]


def read_stream(answer: http.client.HTTPResponse) -> list[dict[str, Any]]:
    """Return the documents of a stream of events."""
    assert answer.status == 200, answer.read()
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = answer.read().decode().split("\n\n")
    assert events[-1] == ""
    data = [event.removeprefix("data: ") for event in events[:-1] if event.startswith("data: ")]
    assert data[-1] == "[DONE]"
    return [json.loads(document) for document in data[:-1]]


def text_of(events: Sequence[dict[str, Any]]) -> str:
    """Return the text of a stream's pieces."""
    choices = [choice for event in events for choice in event["choices"]]
    return "".join(
        choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices
    )


@contextmanager
def running_worker(
    engine: Any, *grants: Grant, log: Path | None = None, log_bytes: int = 10**6, **settings: Any
) -> Iterator[Worker]:
    """Run a worker; with grants it asks for tokens."""
    chosen = WorkerSettings(ListenAddress("127.0.0.1", 0), response_log=log, **settings)
    figures = WorkerMetrics()
    responses = ResponseLog(log, log_bytes, figures.logged) if log else None
    decoder = Decoder(lambda: engine, figures, queue=chosen.queue, keep=responses.put if responses else None)
    site = WorkerSite(decoder, figures, Permissions(grants or None), chosen)
    loop = Loop()
    listening = socket.create_server(("127.0.0.1", 0))
    server = HttpServer(make_app(site, hosts=()))
    done = asyncio.run_coroutine_threadsafe(server.serve(sockets=[listening]), loop.loop)
    decoder.start()
    try:
        until(lambda: decoder.ready)
        yield Worker(decoder, listening.getsockname()[:2], site)
    finally:
        decoder.drain()
        decoder.hurry()
        if getattr(engine, "gate", None):
            engine.gate.release(10_000)
        assert decoder.join(SECONDS)
        loop.loop.call_soon_threadsafe(server.stop)
        done.result(SECONDS)
        loop.close()
        if responses:
            responses.close()


@contextmanager
def served_worker(*arguments: object, folder: Path, module: str = "draftstore") -> Iterator[Service]:
    """Run `draftstore worker` in a process of its own, and wait until it is ready.

    Args:
        arguments: of the command.
        folder: for its log.
        module: that is run instead, with the same output: `tests.fakes.workers` has no model.
    """
    service = Service(launch_worker(*arguments, folder=folder, module=module), folder)
    with started(service):
        yield service


def launch_worker(*arguments: object, folder: Path, module: str = "draftstore") -> "subprocess.Popen[str]":
    """Start a worker on a free port, with JSON on standard output."""
    command = [
        sys.executable,
        "-m",
        module,
        "worker",
        "--json",
        "--port",
        "0",
        "--log-format",
        "json",
        *arguments,
    ]
    with (folder / "log").open("a") as log:
        return subprocess.Popen(
            [str(word) for word in command],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )


@click.group()
def commands() -> None:
    """Stand in for `draftstore`, without torch."""


@commands.command()
@click.option("--tokenizer", type=click.Path(path_type=Path), required=True)
@click.option("--load-seconds", type=float, default=0.0)
@click.option("--fail", is_flag=True)
@click.option("--pass-seconds", type=float, default=0.0)
@click.option("--hold", type=click.Path(path_type=Path))
@click.option("--tokens", type=click.Path(path_type=Path))
@click.option("--grace-seconds", type=float, default=30.0)
@click.option("--cut-seconds", type=float, default=5.0)
@click.option("--json", is_flag=True)
@click.option("--host", default="127.0.0.1")
@click.option("--port", type=int)
@click.option("--log-format")
@access_options
def worker(
    tokenizer: Path, load_seconds: float, fail: bool, pass_seconds: float, hold: Path | None, cut_seconds: float,
    host: str, port: int, json: bool, **more: Any,
) -> None:  # fmt: skip
    """Run a worker whose model counts for ever, at its own pace; with `--hold` it stops while that file is there."""

    def load() -> FakeEngine:
        time.sleep(load_seconds)
        if fail:
            raise DraftstoreError("there is no model")
        loaded = load_tokenizer(tokenizer)
        counting = loaded.encode(" " + " ".join(map(str, range(300))), bos=False).tolist()
        return SlowEngine(loaded, lambda _work: counting, pass_seconds, hold)

    running.CUT_SECONDS = cut_seconds
    try:
        sys.exit(running.run(WorkerSettings(ListenAddress(host, port), **more), load, print_json))
    except DraftstoreError as error:
        sys.exit(f"error: {error}")


class SlowEngine(FakeEngine):
    """A model that takes its time."""

    def __init__(
        self,
        tokenizer: TextTokenizer,
        answer: Callable[[GenerationRequest], Sequence[int]],
        pass_seconds: float,
        hold: Path | None,
    ) -> None:
        super().__init__(tokenizer, answer, positions=2000)
        self._seconds, self._hold = pass_seconds, hold

    def passes(self, work: GenerationRequest) -> Iterator[Step]:
        for step in super().passes(work):
            yield step
            time.sleep(self._seconds)
            while self._hold and self._hold.exists():
                time.sleep(0.005)


if __name__ == "__main__":
    commands()
