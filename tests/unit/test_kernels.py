"""Compiled kernels are kept where that is possible, and compiled by one process."""

import os
import subprocess
import sys
from pathlib import Path

KERNEL = "from draftstore.jit import kernel\n@kernel\ndef answer(): return 2\n"
CALL = """
import sys
from module import answer
sys.stdin.readline()
print(answer(), sum(answer.stats.cache_misses.values()))
"""


def test_processes_that_start_at_once_compile_a_kernel_once(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(KERNEL)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", CALL], cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        for _ in range(4)
    ]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.flush()
    answers = [process.communicate()[0].split() for process in processes]
    assert sorted(answers) == [[b"2", b"0"]] * 3 + [[b"2", b"1"]]


def test_kernels_compile_without_a_cache_where_nothing_is_writable() -> None:
    """One warning, and the kernel runs."""
    code = """
import numpy as np
from draftstore.jit import kernel
@kernel
def add(values): return values.sum()
@kernel
def less(values): return values[0] - 1
assert (add(np.arange(4)), less(np.arange(4))) == (6, -1)
"""
    nowhere = {"NUMBA_CACHE_DIR": "/proc/none", "NUMBA_CACHE_LOCATOR_CLASSES": "UserProvidedCacheLocator"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | nowhere, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")
    assert [
        line for line in done.stderr.splitlines() if "NUMBA_CACHE_DIR" in line
    ] == done.stderr.splitlines()
    assert done.stderr.count("\n") == 1
