"""The command `sglang.launch_server` on a CPU, in separate processes, with stand-ins for its compiled kernels.

with launched(model, folder, "--speculative-algorithm", "DRAFTSTORE") as server:
    answers = server.ready().ask([[1, 403], [1, 378]], max_new_tokens=64)

Starting is mostly imports, on one core: several are launched before the first is awaited.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tests.fakes.waiting import until

START_SECONDS = 480.0
MEMORY_TOKENS = 1500
"""For all short answers of a test at once, but not for the long ones."""
STAND_INS = Path(__file__).parent / "stand_ins"
DRAFTS = ("--speculative-algorithm", "DRAFTSTORE")


class Answer(NamedTuple):
    """A greedy answer.

    Attributes:
        ids: int [any].
        passes: after the one that read the prompt; 0 without drafts.
        cached: tokens of the prompt that were in the cache.
        retractions: times that the request was put back.
    """

    ids: list[int]
    passes: int
    cached: int
    retractions: int

    @classmethod
    def read(cls, reply: dict[str, Any]) -> "Answer":
        about = reply["meta_info"]
        passes, cached = about.get("spec_verify_ct", 0), about["cached_tokens"]
        return cls(reply["output_ids"], passes, cached, about["num_retractions"])


class Server:
    """A running server."""

    def __init__(self, process: "subprocess.Popen[bytes]", port: int, log: Path) -> None:
        self.process, self.port, self.log = process, port, log

    def _open(self, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data, {"Content-Type": "application/json"}
        )
        return urllib.request.urlopen(request, timeout=120)

    def ready(self) -> "Server":
        """Wait until it answers."""
        until(self._is_ready, lambda: self.log.read_text()[-4000:], START_SECONDS)
        return self

    def _is_ready(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()[-4000:]
        try:
            with self._open("/health"):
                return True
        except OSError:  # not there yet, or status 503
            return False

    def refusal(self) -> str:
        """Wait until it has ended by itself; return the error of ours that it logged."""
        assert self.process.wait(START_SECONDS) != 0
        [*_, line] = [line for line in self.log.read_text().splitlines() if "draftstore.errors" in line]
        return line

    def _generate(self, prompts: Any, wishes: Any, sampling: dict[str, Any], **more: Any) -> Any:
        asked = {"temperature": 0, "ignore_eos": True, "custom_params": {"draftstore": wishes}} | sampling
        return self._open("/generate", {"input_ids": prompts, "sampling_params": asked} | more)

    def ask(
        self, prompts: Sequence[Sequence[int]], wishes: Any = None, rid: str | None = None, **sampling: Any
    ) -> list[Answer]:
        """Answer prompts, all at once.

        Args:
            wishes: a request's `custom_params.draftstore`.
            rid: what the server knows the first by; the others are numbered.
            sampling: other parameters; for as many tokens as `max_new_tokens`, if not given.
        """
        rids = {} if rid is None else {"rid": [f"{rid}{place or ''}" for place in range(len(prompts))]}
        with self._generate(prompts, wishes, sampling, **rids) as reply:
            return [Answer.read(each) for each in json.load(reply)]

    def stream(self, prompt: Sequence[int], wishes: Any = None, **sampling: Any) -> Iterator[Answer]:
        """Answer a prompt piece by piece; each has the ids so far."""
        with self._generate(prompt, wishes, sampling, stream=True) as reply:
            for line in reply:
                if line.startswith(b"data: {"):
                    yield Answer.read(json.loads(line.removeprefix(b"data: ")))


@contextmanager
def launched(model: Path, folder: Path, *options: str, **environment: str) -> Iterator[Server]:
    """Start a server, and end it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        *(sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), "--port", str(port)),
        *("--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native"),
        *("--max-running-requests", "12", "--context-length", "512", "--skip-server-warmup", "--sleep-on-idle"),
        *("--max-total-tokens", str(MEMORY_TOKENS), "--constrained-json-disable-any-whitespace"),
        *options,
    ]  # fmt: skip
    settings = {
        "SGLANG_USE_CPU_ENGINE": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        # Requests begin as if their answers were short: all at once, and long ones are put back.
        "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "16",
        "DRAFTSTORE_ADAPTIVE": "false",  # as many passes as the replay predicts
        "PYTHONPATH": str(STAND_INS),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",  # ninja is there
    }
    log = folder / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=os.environ | settings | environment,
            start_new_session=True,
        )
    try:
        yield Server(process, port, log)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
