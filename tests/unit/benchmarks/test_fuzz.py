"""The fuzz sends what it says, and sees silence and a service's own errors."""

import json
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("psutil")
pytest.importorskip("matplotlib")

from benchmarks.fuzz import Phase, by_mode, ratios
from benchmarks.fuzzed import FrameFuzzer, HttpFuzzer, expects_answer, is_frame
from benchmarks.fuzzing import CUT_OFF, FUZZ, QUIET, VALID, Sender, faults, send_http
from tests import ROOT
from tests.fakes.waiting import SECONDS

ASKED = [("/v1/draft", {"release": "x", "budget": 3}), ("/metrics", None)]


def test_the_same_seed_makes_the_same_inputs() -> None:
    for make in (lambda seed: FrameFuzzer(seed, ("rest",)), lambda seed: HttpFuzzer(seed, ASKED)):
        first, second, other = make(1), make(1), make(2)
        inputs = [first() for _ in range(500)]
        assert [second() for _ in range(500)] == inputs
        assert [other() for _ in range(500)] != inputs
        assert len(set(inputs)) > 300


def test_what_is_a_request_is_told_from_what_is_none() -> None:
    fuzzer = HttpFuzzer(1, ASKED)
    assert all(expects_answer(fuzzer.unchanged()) for _ in range(10))
    whole = fuzzer.unchanged()
    for other in (
        whole[:-1],
        whole[1:],
        whole + b"x",
        b"",
        b"\0" * 40,
        whole.partition(b"\r\nHost")[0],
        whole.replace(b"HTTP", b"HTTQ"),
    ):
        assert not expects_answer(other)
    frames = FrameFuzzer(1, ("rest",))
    assert all(is_frame(frame) for frame in frames.valid)
    assert not is_frame(frames.valid[0][:-1])


@contextmanager
def answering(*answers: bytes) -> Iterator[tuple[str, int]]:
    """Answer connections with these bytes in turn."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            for answer in answers:
                with listening.accept()[0] as sock:
                    while not sock.recv(1 << 16).endswith((b"\r\n\r\n", b"}")):
                        pass
                    sock.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield listening.getsockname()
        thread.join()


def test_silence_and_own_errors_are_seen() -> None:
    examples: list[str] = []
    with answering(b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.1 500 No\r\n\r\n", b"") as address:
        send = send_http(address, HttpFuzzer(1, ASKED), examples)
        assert [send(False) for _ in range(3)] == [["200"], ["500"], [CUT_OFF]]
    assert len(examples) == 1
    assert faults(Counter({"200": 5, "500": 2, "400": 1, CUT_OFF: 1})) == {"500": 2, CUT_OFF: 1}


def test_a_sender_ends_when_it_has_sent_enough_of_the_strange() -> None:
    done = threading.Event()

    def send(strange: bool) -> list[str]:
        if sender.sent[FUZZ] + 3 >= 9:
            done.set()
        return ["OK" if strange else "fine"] * 3

    sender = Sender("all", 9, 1e6, send)
    sender.mode = FUZZ
    sender.start()
    assert done.wait(SECONDS)
    sender.stop()
    assert sender.done
    assert sender.ends == {"OK": 9}


def test_latencies_belong_to_the_phase_in_which_requests_fell_due() -> None:
    phases = [
        Phase(QUIET, 0.0, 10.0),
        Phase(VALID, 10.0, 20.0),
        Phase(FUZZ, 20.0, 30.0),
        Phase(QUIET, 30.0, 40.0),
    ]
    due = np.arange(0.0, 50.0, 0.5) + 0.35
    seconds = np.where((due >= 20) & (due < 30), 0.003, 0.001)
    found = by_mode(phases, due, seconds)
    assert [found[mode]["answers"] for mode in (QUIET, VALID, FUZZ)] == [40, 20, 20]
    assert ratios(found) == {QUIET: 3.0, VALID: 3.0}
    assert ratios(by_mode([], due, seconds)) == {}


@pytest.mark.slow
def test_it_runs(data: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.fuzz", "--quick", "--requests", "200", "--phase", "1"]
    told = ["--data", str(data), "--work", str(tmp_path), "--out", str(tmp_path)]
    ran = subprocess.run([*command, *told], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found["crashes"] == {"ended": [], "restarts_metric": 0}
    assert found["drafts_of_others"]["wrong"] == 0
    assert found["completions_of_others"]["problems"] == []
    assert all(each["faults"] == {} for each in found["fuzz"].values()), found["without_answer"]
    assert sum(each["sent"][FUZZ] for each in found["fuzz"].values()) >= 200
