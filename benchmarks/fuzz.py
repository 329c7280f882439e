"""Strange bytes against lookup service and decoding worker under load: `python -m benchmarks.fuzz`.

Frames and HTTP requests that are mutated, cut, extreme or noise go to a real service with two workers, and HTTP
requests to a decoding worker with a small model, while others ask well-formed questions at an even pace. Three phases
take turns: quiet; as many well-formed requests as the fuzz has strange ones; the fuzz. What the fuzz does to others is
their latency in it against that in the quiet, and what it does beyond its mere work against that in the second phase.
No process may end or grow, no answer to others may be wrong, and everything that is a request gets an answer that is
not the service's own error. Tables first; the last line of stdout is one JSON document, also written to OUT/fuzz.json.

Example:
    DRAFTSTORE_TEST_DATA=~/data python -m benchmarks.fuzz --work ~/bench --requests 100000
"""

import argparse
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.common import Workspace, add_arguments, open_workspace
from benchmarks.fuzzed import FrameFuzzer, HttpFuzzer
from benchmarks.fuzzing import FUZZ, QUIET, VALID, Sender, send_frames, send_http, summary
from benchmarks.keeping import TROUBLE, ask, decoding_worker, is_ready
from benchmarks.loadgen import Load
from benchmarks.loadplan import Question, make_plan
from benchmarks.loadrun import RunningLoad
from benchmarks.measure import progress
from benchmarks.report import describe_machine, finish, show_table
from benchmarks.served import prepare
from benchmarks.service import anonymous_bytes, free_port, running

MODES = (QUIET, VALID, FUZZ)
NAMES = ("crest", "rest")
SHARES = {"frames": 0.5, "HTTP of the service": 0.25, "HTTP of the worker": 0.25}
"""Parts of the strange requests."""
SETTLE_SECONDS = 0.3
"""Time at the start of a phase in which nothing counts."""
LONGEST = 86_400.0
PROMPT = "Once upon a time, there was a little girl named Lily."
ASKED = {"prompt": PROMPT, "max_tokens": 2, "temperature": 0.0}
CHAT = {
    "messages": [{"role": "user", "content": "Hi"}],
    "max_tokens": 1,
    "stop": ["x"],
    "seed": 1,
    "top_p": 0.9,
}
DRAFT = {"release": "crest", "contexts": [[450, 4996, 17354], []], "budget": 16, "min_prob": 0.0}
TEXT = {"release": "rest", "text": "What is the", "budget": 8, "strategy": "longest"}
SHORT = ("--max-tokens", "8", "--max-choices", "1")
"""The worker decodes a few answers at a time: strange requests that ask for much would rightly keep others waiting."""
RESTARTS = "draftstore_worker_restarts_total"


class Phase(NamedTuple):
    """Some seconds of one kind; times of the monotonic clock."""

    mode: str
    begin: float
    end: float


class Reader(threading.Thread):
    """Asks the worker the same well-formed question over and over.

    Attributes:
        asked: time and seconds of each answer.
        problems: answers that were refused, or another text.
    """

    def __init__(self, url: str, pause: float) -> None:
        """Take the first answer for right."""
        super().__init__(name="reader", daemon=True)
        self.asked: list[tuple[float, float]] = []
        self.problems: list[str] = []
        self._url, self._pause = f"{url}/v1/completions", pause
        self._stopped = threading.Event()
        self._text = ask(self._url, {**ASKED, "max_tokens": 8})[1]["choices"][0]["text"]

    def run(self) -> None:
        """Ask."""
        while not self._stopped.wait(self._pause):
            begin = time.monotonic()
            try:
                status, found = ask(self._url, {**ASKED, "max_tokens": 8})
            except TROUBLE as error:
                self.problems.append(type(error).__name__)
                continue
            if status != 200:
                self.problems.append(str(status))
            elif found["choices"][0]["text"] != self._text:
                self.problems.append("another text")
            else:
                self.asked.append((begin, time.monotonic() - begin))

    def stop(self) -> None:
        """End."""
        self._stopped.set()
        self.join()


def main() -> None:
    """Run it and finish with the JSON document."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fuzz", description=__doc__)
    add_arguments(parser)
    parser.add_argument("--requests", type=int, help="strange ones (default: 100,000; quick: 600)")
    parser.add_argument(
        "--pace", type=float, default=400.0, help="strange requests a second (default: %(default)s)"
    )
    parser.add_argument(
        "--rate", type=float, default=200.0, help="drafts of others a second (default: %(default)s)"
    )
    parser.add_argument("--phase", type=float, help="seconds of a phase (default: 10; quick: 1.5)")
    args = parser.parse_args()
    args.requests = args.requests or (600 if args.quick else 100_000)
    args.phase = args.phase or (1.5 if args.quick else 10.0)
    with open_workspace(args) as workspace, ExitStack() as stack:
        figures = run(args, workspace, stack)
    show(figures)
    finish(args.out, "fuzz", describe_machine(("uvloop", "transformers")) | {"quick": args.quick} | figures)


def run(args: argparse.Namespace, workspace: Workspace, stack: ExitStack) -> dict[str, Any]:
    """Start everything, fuzz, and return the figures."""
    served = prepare(workspace, quick=True, contexts=4096, postgres=False)
    stores = dict(zip(NAMES, (served.crest[0], served.rest[0]), strict=True))
    plan, trace = workspace.work / "plan-fuzz.npz", workspace.work / "fuzz-trace.npz"
    questions = [Question(name, "", served.draw(1, 400)) for name in NAMES]
    make_plan(questions, {name: [path] for name, path in stores.items()}).save(plan)
    progress("service and worker")
    port = free_port()
    model = workspace.data / "models" / "stories260K"
    log = workspace.work / "fuzz-worker.log"
    worker = stack.enter_context(decoding_worker(model, port, log, "--fixed-budget", *SHORT))
    service = stack.enter_context(running(stores, workers=2, log=workspace.work / "fuzz-service.log"))
    url = f"http://127.0.0.1:{port}"
    worker.wait_for(lambda: is_ready(url))
    examples: list[str] = []
    senders = make_senders(args, service.address, service.port, port, examples)
    reader = Reader(url, 0.2)
    processes = dict(service.processes()) | {worker.process.pid: "decoding worker"}
    load = RunningLoad(Load(service.address, str(plan), LONGEST, 8, args.rate, trace=str(trace)))
    progress(f"{args.requests:,} strange requests")
    reader.start()
    for sender in senders:
        sender.start()
    warm = run_phases(senders, itertools.islice(itertools.cycle(MODES), len(MODES)), args.phase)
    before = {pid: anonymous_bytes(pid) for pid in processes}
    phases = [*warm, *run_phases(senders, itertools.cycle(MODES), args.phase)]
    for sender in senders:
        sender.stop()
    reader.stop()
    load.stop()
    after = {pid: anonymous_bytes(pid) for pid in processes}
    alive = set(service.processes()) | {member.pid for member in worker.family()}
    loaded = load.result()
    with np.load(trace) as arrays:
        drafts = by_mode(phases, arrays["due"], arrays["latency"])
    asked = np.array(reader.asked or [(0.0, 0.0)])
    return {
        "requests": args.requests, "pace": args.pace, "rate": args.rate, "phase_seconds": args.phase,
        "seconds": round(phases[-1].end - phases[0].begin, 1),
        "fuzz": {sender.name: summary(sender) for sender in senders}, "without_answer": examples,
        "crashes": {"ended": [processes[pid] for pid in processes if pid not in alive],
                    "restarts_metric": restarts(service.port)},
        "memory": [
            {"process": role, "before": before[pid], "after": after[pid], "growth_bytes": after[pid] - before[pid]}
            for pid, role in processes.items()
        ],
        "drafts_of_others": {"latency_us": drafts, "p99_ratio": ratios(drafts), "wrong": loaded["wrong"],
                             "problems": loaded["problems"]},
        "completions_of_others": {"latency_us": (found := by_mode(phases, asked[:, 0], asked[:, 1])),
                                  "p99_ratio": ratios(found), "problems": reader.problems},
    }  # fmt: skip


def make_senders(
    args: argparse.Namespace, address: str, http: int, worker: int, examples: list[str]
) -> list[Sender]:
    """Return what sends strange requests, in parts as `SHARES` says."""
    at_service = HttpFuzzer(
        2, [("/v1/draft", DRAFT), ("/v1/draft", TEXT), ("/v1/releases", None), ("/metrics", None)]
    )
    at_worker = HttpFuzzer(
        3, [("/v1/completions", ASKED), ("/v1/chat/completions", CHAT), ("/v1/models", None)]
    )
    sends: Sequence[Callable[[bool], list[str]]] = (
        send_frames(address, FrameFuzzer(1, NAMES)),
        send_http(("127.0.0.1", http), at_service, examples),
        send_http(("127.0.0.1", worker), at_worker, examples),
    )
    return [
        Sender(name, round(args.requests * share), args.pace * share, send)
        for (name, share), send in zip(SHARES.items(), sends, strict=True)
    ]


def run_phases(senders: Sequence[Sender], modes: Any, seconds: float) -> list[Phase]:
    """Go from phase to phase until the modes end or all has been sent."""
    phases = []
    for mode in modes:
        begin = time.monotonic()
        for sender in senders:
            sender.mode = mode
        time.sleep(seconds)
        phases.append(Phase(mode, begin, time.monotonic()))
        if not all(sender.is_alive() for sender in senders):
            raise SystemExit("nobody answers any more: the logs in --work say why")
        if all(sender.done for sender in senders):
            break
    for sender in senders:
        sender.mode = QUIET
    return phases


def by_mode(
    phases: Sequence[Phase], due: NDArray[np.float64], seconds: NDArray[np.float64]
) -> dict[str, dict[str, float]]:
    """Sum up the latencies of each mode, in microseconds; times and latencies are float64 [answers], in seconds."""
    found = {}
    for mode in MODES:
        inside = np.zeros(len(due), np.bool_)
        for phase in phases:
            if phase.mode == mode:
                inside |= (due >= phase.begin + SETTLE_SECONDS) & (due < phase.end)
        micros = seconds[inside] * 1e6
        found[mode] = {"answers": len(micros)} | {
            f"p{percent}" if percent < 100 else "max": round(float(np.percentile(micros, percent)), 1)
            for percent in (50, 99, 100)
            if len(micros)
        }
    return found


def ratios(latency: dict[str, dict[str, float]]) -> dict[str, float]:
    """Return the 99th percentile in the fuzz against that in the other modes."""
    p99 = {mode: figures["p99"] for mode, figures in latency.items() if "p99" in figures}
    return {mode: round(p99[FUZZ] / p99[mode], 2) for mode in (QUIET, VALID) if {mode, FUZZ} <= p99.keys()}


def restarts(port: int) -> float:
    """Return how often the service says that it started a worker again."""
    from urllib.request import urlopen

    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(RESTARTS))


def show(figures: dict[str, Any]) -> None:
    """Print the tables."""
    show_table("strange requests", ["", "sent", "own errors or silence", "ends"], [
        [name, each["sent"].get(FUZZ, 0), sum(each["faults"].values()), str(each["ends"])]
        for name, each in figures["fuzz"].items()
    ])  # fmt: skip
    for name in ("drafts_of_others", "completions_of_others"):
        rows = [[mode, *us.values()] for mode, us in figures[name]["latency_us"].items()]
        show_table(name.replace("_", " "), ["", "answers", "p50 µs", "p99 µs", "max µs"], rows)
        print(
            f"p99 in the fuzz against other phases: {figures[name]['p99_ratio']}, {figures[name]['problems']}"
        )
    show_table("resident anonymous memory", ["process", "before MB", "after MB", "growth MB"], [
        [each["process"], each["before"] / 1e6, each["after"] / 1e6, each["growth_bytes"] / 1e6]
        for each in figures["memory"]
    ])  # fmt: skip
    print(f"ended: {figures['crashes']}")


if __name__ == "__main__":
    main()
