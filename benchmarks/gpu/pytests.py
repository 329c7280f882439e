"""The part `tests`: all tests that need a GPU, marked `gpu`, in a separate process."""

import os
import subprocess
import sys
from typing import Any

from benchmarks.common import DATA_VARIABLE
from benchmarks.gpu.sheet import Sheet
from benchmarks.processes import CHECKOUT

FOLDER, QUICK_FILE = "tests/unit/hf", "test_runner.py"


def run(sheet: Sheet) -> None:
    """Run the tests; with --quick, only those of one file."""
    bench = sheet.bench
    place = f"{FOLDER}/{QUICK_FILE}" if bench.args.quick else FOLDER
    options = ("-m", "gpu", "-q", "-p", "no:cacheprovider", "-W", "default")
    command = [sys.executable, "-m", "pytest", place, *options]
    environment = os.environ | {DATA_VARIABLE: str(bench.space.data)}

    def tests() -> dict[str, Any]:
        done = subprocess.run(command, cwd=CHECKOUT, env=environment, capture_output=True, text=True)
        lines = done.stdout.splitlines()
        return {"result": lines[-1] if lines else "", "failed": done.returncode}

    sheet.cell(place, tests)
