"""Cost and capacity of the lookup service: `python -m benchmarks.service`.

roundtrips   one caller, 1 and 32 contexts of a REST and a CREST store: `draftstore.remote.client`, an echo of as many
             bytes over the same kind of socket, and the same drafts in the caller's process, interleaved in random
             order. The ratio is the client's median over the sum of those of echo and lookup. Every draft is compared.
appends      consecutive appends of answers of 100 and 1,000 tokens to a live store with a log, and drafts of the CREST
             store for one context with and without concurrent appends.
load         the peak over 16 connections, also with consecutive HTTP requests alongside; then evenly spaced requests at
             80 % of it, also with 20 HTTP requests per second alongside, and the echo under the same load: latency, and
             the share answered within the client's default deadline.

The caller, the load and the service share the cores of this machine. Tables first; the last line of stdout is one JSON
document, also written to OUT/service.json. Exit status 1 if an answer was wrong or missing.

Example:
    DRAFTSTORE_TEST_DATA=~/data python -m benchmarks.service --work ~/bench
"""

import argparse
import itertools
import os
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.common import (
    AUTHORS_TOKEN_BYTES,
    CHAT,
    PART_OF_REST,
    TINY,
    RecordingSet,
    Workspace,
    add_arguments,
    chosen,
    draw_contexts,
    open_workspace,
)
from benchmarks.measure import call_fresh, progress
from benchmarks.processes import NO_ANSWER, Program, ask, lookup_service
from benchmarks.report import describe_machine, finish, show_rows
from benchmarks.service.echo import HEADER, Caller, echo_frame
from benchmarks.service.load import Load, run_load
from benchmarks.service.roundtrips import appends, roundtrips
from draftstore.remote.client import DEADLINE
from draftstore.remote.wire import encode_request
from draftstore.stores.crest.build import CrestOptions, build_crest
from draftstore.trees.frontier import BUDGET

RECORDED = RecordingSet("alpaca_eval.jsonl.zst", "vicuna-7b-v1.5")
WIDTH = 16
SAMPLES = {1: 4000, 32: 600}
"""Numbers of timed requests by contexts per request."""
REQUESTS = 512
"""Number of different requests in a load."""
ANSWERS = (100, 1000)
"""Tokens of the appended answers."""
LIVE = "live"
SHARE = 0.8
TITLES = {
    "roundtrips": "round trips of one caller, µs",
    "appends": "appends to a live store, and drafts beside them, µs",
    "load": "loads over 16 connections; latency from when a request was due",
}
HTTP_PAUSE, HTTP_PAUSE_PACED = 0.005, 0.05
"""Seconds between two HTTP requests alongside a load."""


def prepare(space: Workspace, quick: bool) -> dict[str, Path]:
    """Return the stores by name, building missing ones."""
    rest = space.store(TINY if quick else CHAT)
    size = int(rest.manifest.counts["tokens"] * AUTHORS_TOKEN_BYTES / PART_OF_REST)
    crest = rest.path.with_name(f"{rest.path.name}-crest")
    progress(f"store {crest.name}")
    build_crest(CrestOptions(name=crest.name, max_bytes=size), rest.path, crest)
    return {"crest": crest, "rest": rest.path}


def measure_loads(
    name: str, service: str, address: str, echo: str, contexts: NDArray[np.int32], seconds: float
) -> Iterator[dict[str, Any]]:
    """Find a store's peaks, and put partial load on service and echo; contexts are int32 [any, size, width]."""
    frames = [encode_request(0, name, batch, BUDGET, 0.0, "") for batch in contexts]
    caller = Caller(address)
    sizes = [len(caller.ask(request)) - HEADER.size for request in frames]
    caller.close()
    echoed = [echo_frame(*pair) for pair in zip(frames, sizes, strict=True)]

    def run(what: str, load: Load) -> dict[str, Any]:
        progress(f"load of {name}, {contexts.shape[1]} contexts: {what}")
        figures = call_fresh(run_load, load, one_core=False)
        return {"store": name, "contexts": contexts.shape[1], "load": what, **figures}

    load = Load(address, frames, seconds)
    peak = run("peak", load)
    yield peak
    url, body = f"{service}/v1/draft", {"release": name, "contexts": contexts[0].tolist()}
    paced = load._replace(rate=SHARE * peak["requests_per_second"])
    yield run(f"{SHARE:.0%} of the peak", paced)
    for what, pause, each in (
        ("peak", HTTP_PAUSE, load),
        (f"{SHARE:.0%} of the peak", HTTP_PAUSE_PACED, paced),
    ):
        with _http_beside(url, body, pause) as answers:
            beside = run(f"{what}, HTTP beside", each)
        yield beside | {"http_answers": answers[200], "http_failed": sum(answers.values()) - answers[200]}
    yield run("the same, echo", paced._replace(address=echo, requests=echoed))


@contextmanager
def _http_beside(url: str, body: dict[str, Any], pause: float) -> Iterator[Counter[int]]:
    """Send consecutive HTTP requests during the block; yield the counts of their statuses, 0 for no answer."""
    answers, stopped = Counter[int](), threading.Event()

    def send() -> None:
        while not stopped.wait(pause):
            status = 0
            with suppress(*NO_ANSWER):
                status, _ = ask(url, body)
            answers[status] += 1

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield answers
    finally:
        stopped.set()
        thread.join()


def _batches(contexts: NDArray[np.int32], size: int, count: int) -> NDArray[np.int32]:
    """Return int32 [count, size, width], repeating the contexts if necessary."""
    return contexts[np.arange(count * size) % len(contexts)].reshape(count, size, -1)


def main() -> None:
    """Run the parts and finish with the JSON document."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.service", description=__doc__)
    add_arguments(parser)
    parser.add_argument("--parts", help=f"any of {','.join(TITLES)} (default: all)")
    parser.add_argument("--seconds", type=float, help="of each load (default: 5)")
    args = parser.parse_args()
    parts = chosen(parser, args.parts, TITLES)
    seconds = args.seconds or (0.5 if args.quick else 5.0)
    figures: dict[str, Any] = {"deadline_ms": DEADLINE * 1000}
    with open_workspace(args) as space, ExitStack() as stack:
        stores = prepare(space, args.quick)
        contexts = draw_contexts(space.recordings(RECORDED), 16_384, WIDTH)
        folder = stack.enter_context(TemporaryDirectory(prefix="draftstore-bench-"))
        address, echo, log = f"{folder}/lookup.sock", f"{folder}/echo.sock", space.work / "service.log"
        served = [f"--store={name}={path}" for name, path in stores.items()]
        service = lookup_service(Path(address), log, *served, f"--live={LIVE}={folder}/live")
        stack.enter_context(closing(service))
        service.wait_until_ready()
        beside = stack.enter_context(closing(Program("echo", ("benchmarks.service.echo", echo), log)))
        beside.wait_for(Path(echo).exists)
        for part in parts:
            rows: list[dict[str, Any]] = []
            if part == "appends":
                batches = _batches(contexts, 1, SAMPLES[1] // (20 if args.quick else 1))
                rows += [
                    call_fresh(appends, address, LIVE, "crest", batches, tokens, one_core=False)
                    for tokens in ANSWERS
                ]
                show_rows(TITLES[part], rows)
                figures[part] = rows
                continue
            for (name, path), (size, count) in itertools.product(stores.items(), SAMPLES.items()):
                count = count // 20 if args.quick else count
                if part == "roundtrips":
                    progress(f"round trips of {name}, {size} contexts")
                    batches = _batches(contexts, size, count)
                    rows.append(call_fresh(roundtrips, address, echo, name, path, batches, one_core=False))
                else:
                    batches = _batches(contexts, size, REQUESTS)
                    rows += measure_loads(name, service.url, address, echo, batches, seconds)
            show_rows(TITLES[part], rows)
            figures[part] = rows
    figures["load_average"] = os.getloadavg()[0]
    finish(args.out, "service", describe_machine(("uvloop", "lmdb")) | {"quick": args.quick} | figures)
    if any(row.get("wrong") or row.get("problems") for part in parts for row in figures[part]):
        sys.exit(1)


if __name__ == "__main__":
    main()
