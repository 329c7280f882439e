"""The part `tests`: all tests that wait for a GPU, marked `gpu`, in a process of their own."""

import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.common import DATA_VARIABLE
from benchmarks.gpu.sheet import Sheet

ROOT = Path(__file__).parents[2]
FOLDER = "tests/unit/hf"
QUICK_FILE = "test_gpu_batches.py"


def run(sheet: Sheet) -> None:
    """Run the files with such tests, one by one."""
    files = sorted((ROOT / FOLDER).glob("test_*.py"))
    marked = [path.name for path in files if "tests.fakes.gpus" in path.read_text(encoding="utf-8")]
    for name in [QUICK_FILE] if sheet.bench.args.quick else marked:
        sheet.cell(name, partial(_run_file, sheet.bench.space.data, name))


def _run_file(data: Path, name: str) -> dict[str, Any]:
    """Return how the tests of a file ended.

    Raises:
        RuntimeError: pytest did not run.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        options = ["-m", "gpu", "-q", "-p", "no:cacheprovider", "-W", "default", f"--junitxml={report}"]
        command = [sys.executable, "-m", "pytest", f"{FOLDER}/{name}", *options]
        environment = os.environ | {DATA_VARIABLE: str(data)}
        done = subprocess.run(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        root = ElementTree.parse(report).getroot() if report.is_file() else ElementTree.Element("none")
        cases = list(root.iter("testcase"))
        if not cases:
            raise RuntimeError(f"pytest ended with status {done.returncode}: {done.stdout[-1000:]}")
    ended = {
        kind: [case.get("name") for case in cases if case.find(kind) is not None]
        for kind in ("failure", "error", "skipped")
    }
    failed = [*ended["failure"], *ended["error"]]
    return {
        "tests": len(cases),
        "passed": len(cases) - len(failed) - len(ended["skipped"]),
        "skipped": len(ended["skipped"]),
        "failed": failed,
        **({"output": done.stdout[-4000:]} if failed else {}),
    }
