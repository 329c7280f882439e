"""Everything that needs a GPU, in one run under a deadline: `make gpu`, or `python -m benchmarks.gpu`.

Stages, the most valuable first; an early end loses the last ones only:

gate        a toy model is captured and decoded; the tests marked `gpu`; what the card can do at best
curve       milliseconds of a pass of an 8B shape by texts and rows, with and without candidates
decode      tokens per second of forced outputs: no drafts, those of request, store and both; planned, fixed, sampled
exact       would other ways have emitted the same tokens, in bf16 beside a yardstick; a small trained model
float32     the same for the 8B shape in float32
peers       `generate` of transformers: either cache, and its own drafts from the prompt
more        longer texts, kernels of attention, all kernels by time
static      `generate` with a static cache for several texts, which is compiled for minutes

OUT/results.json has every cell as soon as it is measured; a table is printed last. Without a GPU: --quick, at toy size.
Exit status 3: the gate failed, and nothing else was tried; 4: the GPU does nothing any more, --resume does the rest.

Example: python -m benchmarks.gpu --seconds 200 --stages peers,more
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Container, Sequence
from pathlib import Path
from signal import SIGTERM, signal

import psutil
import torch

from benchmarks.cells import Cells, failed
from benchmarks.common import DATA_VARIABLE, Workspace, add_arguments, chosen, open_workspace
from benchmarks.gpu.stages import NEED_STORE, STAGES, Beside, Run, warm
from benchmarks.processes import CHECKOUT
from benchmarks.report import describe_machine

PACKAGES = ("torch", "transformers", "triton", "lmdb", "zstandard")
WORK = Path("data/gpu")
LEAST_SECONDS, MOST_IMPORTING = 3.0, 60.0
"""No stage begins with less time left; an older process has a wrong clock."""


def start_beside(args: argparse.Namespace, space: Workspace, known: Container[str]) -> Beside:
    """Start what runs beside the start, unless known: store and kernels without the GPU, the tests that need one."""
    folders = [f"--{name}={getattr(space, name)}" for name in ("data", "work", "out")]
    files = [
        str(path) for path in CHECKOUT.glob("tests/unit/**/test_*.py") if "needs_gpu" in path.read_text()
    ]
    build = ["benchmarks.gpu", "--warm", *folders, *["--quick"] * args.quick]
    tests = ["pytest", *files, "-m", "gpu", "-q", "-p", "no:cacheprovider", "-W", "default", "-rfE"]
    started = {}
    for name, command, own, needed in (
        ("warm", build, {"CUDA_VISIBLE_DEVICES": ""}, NEED_STORE & set(args.stages)),
        ("tests", tests, {DATA_VARIABLE: str(space.data)}, "gate" in args.stages),
    ):
        if needed and name not in known:
            with (space.out / f"{name}.txt").open("wb") as log:
                started[name] = subprocess.Popen(
                    [sys.executable, "-m", *command],
                    cwd=CHECKOUT,
                    env=os.environ | own,
                    stdout=log,
                    stderr=log,
                )
    return started


def run_stages(run: Run, stages: Sequence[str]) -> None:
    """Run the stages for which time is left."""
    for name in stages:
        if run.cells.left() < LEAST_SECONDS:
            run.cells.cut.append(name)
            continue
        try:
            STAGES[name](run)
        except Exception as error:  # noqa: BLE001 (the other stages are measured)
            run.cells.keep(name, "the rest of the stage", failed(error))


def main() -> None:
    """Run the stages and print the table."""
    begun = time.perf_counter() - min(max(0.0, time.time() - psutil.Process().create_time()), MOST_IMPORTING)
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    add_arguments(parser)
    parser.set_defaults(work=WORK, out=WORK / "out")
    parser.add_argument("--seconds", type=float, default=540, help="for the whole run (default: %(default)s)")
    parser.add_argument("--stages", help=f"any of {','.join(STAGES)}, in this order (default: all)")
    parser.add_argument("--resume", action="store_true", help="keep the cells of results.json")
    parser.add_argument("--warm", action="store_true", help="only build the store and compile the kernels")
    args = parser.parse_args()
    args.stages = sorted(chosen(parser, args.stages, STAGES), key=list(STAGES).index)
    if args.quick:
        torch.set_num_threads(1)  # toys need no more, and several wait for each other where a machine is busy
    signal(SIGTERM, lambda *_: sys.exit(128 + SIGTERM))
    with open_workspace(args) as space:
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        about = describe_machine(PACKAGES) | {
            "device": device,
            "cuda": torch.version.cuda,
            "quick": args.quick,
        }
        cells = Cells(args.out, about, begun + args.seconds, resume=args.resume)
        if args.warm:
            os.nice(10)
            warm(Run(space, args, cells, {}))
            return
        beside = start_beside(args, space, cells.stages.get("gate", {}))
        try:
            run_stages(Run(space, args, cells, beside), args.stages)
        finally:
            for process in beside.values():
                process.kill()
            print(json.dumps(about))
            cells.show()
            print(f"{time.perf_counter() - begun:.0f} s in all")


if __name__ == "__main__":
    main()
