"""Everything that needs a GPU, in one run under a deadline: `make gpu`, or `python -m benchmarks.gpu`.

Stages, the most valuable first; an early end loses the last ones only:

gate        a toy model is captured and decoded; the tests marked `gpu`; what the card can do at best
curve       milliseconds of a pass of an 8B shape by texts and rows, with and without candidates
decode      tokens per second of forced outputs: without drafts, with those of request, store and both; sampled
exact       would other ways have emitted the same tokens, in bf16 beside a yardstick; a small trained model
float32     the same for the 8B shape in float32
peers       `generate` of transformers: either cache, and its own drafts from the prompt
more        longer texts, kernels of attention, small kernels fused, all kernels by time
static      `generate` with a static cache for several texts, which takes minutes to compile

Store and kernels are built beside the start. OUT/results.json has every cell as soon as it is measured; the last lines
of stdout are a table. Without a GPU, everything runs on the CPU: add --quick. Exit status 3: the gate failed, and
nothing else was tried; 4: the GPU does nothing any more, and --resume measures what is left.

Examples:
    python -m benchmarks.gpu --quick                                 # toy size, minutes on a CPU
    python -m benchmarks.gpu --seconds 200 --stages peers,more
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
from typing import Any

import psutil
import torch

from benchmarks.common import DATA_VARIABLE, Workspace, add_arguments, chosen, open_workspace
from benchmarks.gpu.cells import BrokenGPUError, Cells, failed
from benchmarks.gpu.forced import SHAPES
from benchmarks.gpu.kit import Beside, Run
from benchmarks.gpu.stages import NEED_STORE, STAGES, warm
from benchmarks.processes import CHECKOUT
from benchmarks.report import describe_machine

PACKAGES = ("torch", "transformers", "triton", "lmdb", "zstandard")
GATE_FAILED, GPU_BROKEN = 3, 4
WORK = Path("data/gpu")


def describe_device() -> dict[str, Any]:
    """Return date, machine, versions, and the GPU if there is one."""
    about = describe_machine(PACKAGES)
    if not torch.cuda.is_available():
        return about | {"device": {"name": "cpu", "threads": torch.get_num_threads()}}
    device = torch.cuda.get_device_properties(0)
    memory = round(device.total_memory / 2**30, 1)
    return about | {"device": {"name": device.name, "memory_gib": memory, "cuda": torch.version.cuda}}


def start_beside(args: argparse.Namespace, space: Workspace, known: Container[str]) -> Beside:
    """Start what runs beside the start, unless known: store and kernels without the GPU, the tests that need one."""
    folders = [f"--{name}={getattr(space, name)}" for name in ("data", "work", "out")]
    files = [
        str(path) for path in CHECKOUT.glob("tests/unit/**/test_*.py") if "needs_gpu" in path.read_text()
    ]
    options = ("-m", "gpu", "-q", "-p", "no:cacheprovider", "-W", "default", "-rfE")
    commands = {}
    if NEED_STORE & set(args.stages):
        commands["warm"] = ["benchmarks.gpu", "--warm", *folders, *["--quick"] * args.quick]
    if "gate" in args.stages:
        commands["tests"] = ["pytest", *files, *options]
    environments = {"warm": {"CUDA_VISIBLE_DEVICES": ""}, "tests": {DATA_VARIABLE: str(space.data)}}
    started = {}
    for name, command in commands.items():
        if name not in known:
            with (space.out / f"{name}.txt").open("wb") as log:
                started[name] = subprocess.Popen(
                    [sys.executable, "-m", *command], cwd=CHECKOUT, env=os.environ | environments[name],
                    stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                )  # fmt: skip
    return started


def run_stages(run: Run, stages: Sequence[str]) -> int:
    """Run the stages, and return the exit status."""
    for name in stages:
        try:
            if STAGES[name](run) is False:
                return GATE_FAILED
        except BrokenGPUError as error:
            print(f"the GPU does nothing any more: {error}", file=sys.stderr)
            return GPU_BROKEN
        except Exception as error:  # noqa: BLE001 (the other stages are measured)
            run.cells.keep(name, "the rest of the stage", failed(error))
    return 0


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    add_arguments(parser)
    parser.set_defaults(work=WORK, out=WORK / "out")
    parser.add_argument("--seconds", type=float, default=540, help="for the whole run (default: %(default)s)")
    parser.add_argument("--stages", help=f"any of {','.join(STAGES)}, in this order (default: all)")
    parser.add_argument("--shape", choices=SHAPES, default="8b", help="of the model (default: %(default)s)")
    parser.add_argument("--resume", action="store_true", help="keep the cells of results.json")
    parser.add_argument("--warm", action="store_true", help="only build the store and compile the kernels")
    args = parser.parse_args(arguments)
    named = chosen(parser, args.stages, STAGES)
    args.stages = [name for name in STAGES if name in named]
    return args


def main() -> None:
    """Run the stages and print the table."""
    args = parse_arguments()
    begun = psutil.Process().create_time() - time.time() + time.perf_counter()
    signal(SIGTERM, lambda *_: sys.exit(128 + SIGTERM))
    with open_workspace(args) as space:
        about = describe_device() | {"quick": args.quick, "shape": args.shape}
        cells = Cells(args.out, about, begun + args.seconds, resume=args.resume)
        if args.warm:
            os.nice(10)
            warm(Run(space, args, cells, {}))
            return
        beside = start_beside(args, space, cells.stages.get("gate", {}))
        try:
            status = run_stages(Run(space, args, cells, beside), args.stages)
        finally:
            for process in beside.values():
                process.kill()
            print(json.dumps(about))
            cells.show()
            print(f"{time.perf_counter() - begun:.0f} s in all")
    sys.exit(status)


if __name__ == "__main__":
    main()
