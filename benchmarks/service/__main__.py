"""What the lookup service costs, and what it bears: `python -m benchmarks.service`.

roundtrips   one caller, 1 and 32 contexts of a REST and of a CREST store: `draftstore.remote.client`, an echo of as
             many bytes over the same kind of socket, and the same drafts in the caller's process, in turn in random
             order. The ratio is the client's median over echo and lookup together. Every draft is compared.
load         the peak over 16 connections, also with HTTP requests beside it; then requests at even distances at 80 % of
             it, beside the echo under the same load: latency, and the share answered within the client's default
             deadline.

The caller, the load and the service share the cores of this machine. Tables first; the last line of stdout is one JSON
document, also written to OUT/service.json. Exit status 1 if an answer was wrong or missing.

Example:
    DRAFTSTORE_TEST_DATA=~/data python -m benchmarks.service --work ~/bench
"""

import argparse
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
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
from benchmarks.report import describe_machine, finish, show_table
from benchmarks.service.echo import echo_frame
from benchmarks.service.frames import HEADER, Caller
from benchmarks.service.load import Load, run_load
from benchmarks.service.roundtrips import BUDGET, roundtrips
from draftstore.remote.client import DEADLINE
from draftstore.remote.wire import encode_request
from draftstore.stores.crest.build import CrestOptions, build_crest

RECORDED = RecordingSet("alpaca_eval.jsonl.zst", "vicuna-7b-v1.5")
WIDTH = 16
SAMPLES = {1: 4000, 32: 600}
"""Timed requests by their contexts."""
REQUESTS = 512
"""Different requests of a load."""
SHARE = 0.8
HTTP_PAUSE = 0.005
"""Seconds between two HTTP requests beside a load."""


def prepare(space: Workspace, quick: bool) -> dict[str, Path]:
    """Return the stores by name, built where they are not there yet."""
    rest = space.store(TINY if quick else CHAT)
    size = int(rest.manifest.counts["tokens"] * AUTHORS_TOKEN_BYTES / PART_OF_REST)
    crest = rest.path.with_name(f"{rest.path.name}-crest")
    progress(f"store {crest.name}")
    return {
        "crest": build_crest(CrestOptions(crest.name, max_bytes=size), rest.path, crest).path,
        "rest": rest.path,
    }


def measure_roundtrips(
    stores: Mapping[str, Path], address: str, echo: str, contexts: NDArray[np.int32], part: float
) -> list[dict[str, Any]]:
    """Time all stores and sizes, each in a fresh process; print the table."""
    rows = []
    for name, path in stores.items():
        for size, count in SAMPLES.items():
            progress(f"round trips of {name}, {size} contexts")
            batches = _batches(contexts, size, int(count * part))
            rows.append(call_fresh(roundtrips, address, echo, name, path, batches, one_core=False))
    kinds = ("client", "echo", "in process")
    show_table(
        "round trips of one caller, µs",
        ["store", "contexts", *(f"{kind} {key}" for kind in kinds for key in ("p50", "p99")), "ratio", "in time"],
        [
            [row["store"], row["contexts"], *(row["us"][kind][key] for kind in kinds for key in ("p50", "p99")),
             row["ratio"], f"{row['within_deadline']:.2%}"]
            for row in rows
        ],
    )  # fmt: skip
    return rows


def measure_loads(
    stores: Mapping[str, Path],
    service: Program,
    address: str,
    echo: str,
    contexts: NDArray[np.int32],
    seconds: float,
) -> list[dict[str, Any]]:
    """Find the peaks, and load the service and the echo in part; print the table."""
    rows = []

    def run(name: str, size: int, what: str, load: Load) -> dict[str, Any]:
        progress(f"load of {name}, {size} contexts: {what}")
        figures = call_fresh(run_load, load, one_core=False)
        rows.append({"store": name, "contexts": size, "load": what, **figures})
        return rows[-1]

    for name in stores:
        for size in SAMPLES:
            batches = _batches(contexts, size, REQUESTS)
            frames = [encode_request(0, name, batch, BUDGET, 0.0, "") for batch in batches]
            load = Load(address, frames, seconds)
            peak = run(name, size, "peak", load)
            with _http_beside(service.url, name, batches[0]) as sent:
                run(name, size, "peak, HTTP beside", load)["http_requests"] = dict(sent)
            paced = load._replace(rate=SHARE * peak["requests_per_second"])
            run(name, size, f"{SHARE:.0%} of the peak", paced)
            caller = Caller(address)
            sizes = [len(caller.ask(request)) - HEADER.size for request in frames]
            caller.close()
            echoed = [echo_frame(*pair) for pair in zip(frames, sizes, strict=True)]
            run(name, size, "the same, echo", paced._replace(address=echo, requests=echoed))
    show_table(
        "loads over 16 connections; latency from when a request was due",
        ["store", "contexts", "load", "requests/s", "p50 µs", "p99 µs", "p99.9 µs", "in time", "problems"],
        [
            [row["store"], row["contexts"], row["load"], row["requests_per_second"], *row["us"].values(),
             f"{row['within_deadline']:.2%}", str(row["problems"] or "")]
            for row in rows
        ],
    )  # fmt: skip
    return rows


@contextmanager
def _http_beside(url: str, release: str, contexts: NDArray[np.int32]) -> Iterator[dict[str, int]]:
    """Ask for drafts over HTTP, one request after the other, within a block; yield the counts of answers."""
    counts, stopped = {"answered": 0, "failed": 0}, threading.Event()
    body = {"release": release, "contexts": contexts.tolist(), "budget": BUDGET}

    def send() -> None:
        while not stopped.wait(HTTP_PAUSE):
            try:
                answered = ask(f"{url}/v1/draft", body)[0] == 200
            except NO_ANSWER:
                answered = False
            counts["answered" if answered else "failed"] += 1

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield counts
    finally:
        stopped.set()
        thread.join()


def _batches(contexts: NDArray[np.int32], size: int, count: int) -> NDArray[np.int32]:
    """Return int32 [count, size, width], from the start again where contexts end."""
    return contexts[np.arange(count * size) % len(contexts)].reshape(count, size, -1)


def main() -> None:
    """Run the parts and finish with the JSON document."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.service", description=__doc__)
    add_arguments(parser)
    known = ("roundtrips", "load")
    parser.add_argument("--parts", help=f"any of {','.join(known)} (default: all)")
    parser.add_argument("--workers", type=int, default=1, help="of the service (default: %(default)s)")
    parser.add_argument("--seconds", type=float, help="of each load (default: 5)")
    args = parser.parse_args()
    parts = chosen(parser, args.parts, known)
    seconds = args.seconds or (0.5 if args.quick else 5.0)
    figures: dict[str, Any] = {"workers": args.workers, "deadline_ms": DEADLINE * 1000}
    with open_workspace(args) as space, ExitStack() as stack:
        stores = prepare(space, args.quick)
        contexts = draw_contexts(space.recordings(RECORDED), 16_384, WIDTH)
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="draftstore-bench-")))
        address, echo = folder / "lookup.sock", folder / "echo.sock"
        log = space.work / "service.log"
        served = [f"--store={name}={path}" for name, path in stores.items()]
        service = stack.enter_context(lookup_service(address, log, *served, "--workers", args.workers))
        service.wait_until_ready()
        beside = stack.enter_context(Program("echo", ("benchmarks.service.echo", echo), log))
        beside.wait_for(echo.exists)
        if "roundtrips" in parts:
            part = 0.05 if args.quick else 1.0
            figures["roundtrips"] = measure_roundtrips(stores, str(address), str(echo), contexts, part)
        if "load" in parts:
            figures["loads"] = measure_loads(stores, service, str(address), str(echo), contexts, seconds)
    figures["load_average"] = os.getloadavg()[0]
    finish(args.out, "service", describe_machine(("uvloop", "lmdb")) | {"quick": args.quick} | figures)
    bad = [
        row
        for row in (*figures.get("roundtrips", ()), *figures.get("loads", ()))
        if row.get("wrong") or row.get("problems")
    ]
    if bad:
        sys.exit(1)


if __name__ == "__main__":
    main()
