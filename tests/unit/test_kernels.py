"""An edited inner kernel is recompiled, whichever room it is in."""

import os
import subprocess
import sys
import time
from pathlib import Path

from tests.fakes.kernels import remove_stale_kernels

OUTER = """
from draftstore.jit import kernel
from rooms.low.inner import one

@kernel
def answer():
    return one() + 1
"""
INNER = """
from draftstore.jit import leaf_kernel

@leaf_kernel
def one():
    return {value}
"""


def write_rooms(rooms: Path, value: int = 1) -> None:
    """Write a kernel, once, and what it calls."""
    outer, inner = rooms / "high" / "outer.py", rooms / "low" / "inner.py"
    for path in (outer, inner):
        path.parent.mkdir(parents=True, exist_ok=True)
    if not outer.exists():
        outer.write_text(OUTER)
    inner.write_text(INNER.format(value=value))


def test_an_edited_inner_kernel_is_compiled_again(tmp_path: Path) -> None:
    rooms = tmp_path / "rooms"

    def answer(value: int) -> int:
        write_rooms(rooms, value)
        code = "from rooms.high.outer import answer; print(answer())"
        ran = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, check=True)
        return int(ran.stdout)

    assert answer(1) == 2
    [kept] = rooms.rglob("*.nbi")
    time.sleep(0.01)
    assert answer(5) == 2, "numba does not notice"
    remove_stale_kernels(rooms)
    assert not kept.exists()
    assert answer(5) == 6
    remove_stale_kernels(rooms)
    os.utime(rooms / "low" / "inner.py", (0, 0))
    assert len(list(rooms.rglob("*.nbi"))) == 1, "what is newer stays"


CALL = """
import sys
from rooms.high.outer import answer
sys.stdin.readline()
print(answer(), sum(answer.stats.cache_misses.values()))
"""


def test_processes_that_start_at_once_compile_a_kernel_once(tmp_path: Path) -> None:
    write_rooms(tmp_path / "rooms")
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
