"""Cost and capacity of the lookup service: `python -m benchmarks.service`.

roundtrips   one caller, 1 and 32 contexts of a REST and a CREST store: `draftstore.remote.client`, an echo of as many
             bytes over the same kind of socket, and the same drafts in the caller's process, interleaved in random
             order. The ratio is the client's median over the sum of those of echo and lookup. Every draft is compared.
load         the peak over 16 connections, each with one request in flight.

The caller, the load and the service share the cores of this machine. Tables first; the last line of stdout is one JSON
document, also written to OUT/service.json. Exit status 1 if an answer was wrong or missing.

Example:
    DRAFTSTORE_TEST_DATA=~/data python -m benchmarks.service --work ~/bench
"""

import argparse
import itertools
import os
import sys
from contextlib import ExitStack, closing
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
    VICUNA,
    Workspace,
    add_arguments,
    chosen,
    draw_contexts,
    open_workspace,
)
from benchmarks.measure import call_fresh, progress
from benchmarks.processes import Program, lookup_service
from benchmarks.report import describe_machine, finish, show_rows
from benchmarks.service.load import run_load
from benchmarks.service.roundtrips import roundtrips
from draftstore.remote.wire import encode_request
from draftstore.stores.crest.build import CrestOptions, build_crest
from draftstore.trees.frontier import BUDGET

WIDTH = 16
SAMPLES = {1: 4000, 32: 600}
"""Numbers of timed requests by contexts per request."""
REQUESTS = 512
"""Number of different requests in a load."""
TITLES = {"roundtrips": "round trips of one caller, µs", "load": "peak over 16 connections; latency in µs"}


def prepare(space: Workspace, quick: bool) -> dict[str, Path]:
    """Return the stores by name, building missing ones."""
    rest = space.store(TINY if quick else CHAT)
    size = int(rest.manifest.counts["tokens"] * AUTHORS_TOKEN_BYTES / PART_OF_REST)
    crest = rest.path.with_name(f"{rest.path.name}-crest")
    progress(f"store {crest.name}")
    build_crest(CrestOptions(name=crest.name, max_bytes=size), rest.path, crest)
    return {"crest": crest, "rest": rest.path}


def measure_load(address: str, name: str, contexts: NDArray[np.int32], seconds: float) -> dict[str, Any]:
    """Find a store's peak; contexts are int32 [any, size, width]."""
    progress(f"load of {name}, {contexts.shape[1]} contexts")
    frames = [encode_request(0, name, batch, BUDGET, 0.0, "") for batch in contexts]
    figures = call_fresh(run_load, address, frames, seconds, one_core=False)
    return {"store": name, "contexts": contexts.shape[1], **figures}


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
    figures: dict[str, Any] = {}
    with open_workspace(args) as space, ExitStack() as stack:
        stores = prepare(space, args.quick)
        contexts = draw_contexts(space.recordings(VICUNA), 16_384, WIDTH)
        folder = stack.enter_context(TemporaryDirectory(prefix="draftstore-bench-"))
        address, echo, log = f"{folder}/lookup.sock", f"{folder}/echo.sock", space.work / "service.log"
        served = [f"--store={name}={path}" for name, path in stores.items()]
        stack.enter_context(closing(lookup_service(Path(address), log, *served))).wait_until_ready()
        beside = stack.enter_context(closing(Program("echo", ("benchmarks.service.echo", echo), log)))
        beside.wait_for(Path(echo).exists)
        for part in parts:
            figures[part] = rows = []
            for (name, path), (size, count) in itertools.product(stores.items(), SAMPLES.items()):
                if part == "roundtrips":
                    progress(f"round trips of {name}, {size} contexts")
                    batches = _batches(contexts, size, count // 20 if args.quick else count)
                    rows.append(call_fresh(roundtrips, address, echo, name, path, batches, one_core=False))
                else:
                    rows.append(measure_load(address, name, _batches(contexts, size, REQUESTS), seconds))
            show_rows(TITLES[part], rows)
    figures["load_average"] = os.getloadavg()[0]
    finish(args.out, "service", describe_machine(("uvloop", "lmdb")) | {"quick": args.quick} | figures)
    if any(row.get("wrong") or row.get("problems") for part in parts for row in figures[part]):
        sys.exit(1)


if __name__ == "__main__":
    main()
