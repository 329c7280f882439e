"""An edited inner kernel is compiled again, in whichever room it lies."""

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


def test_an_edited_inner_kernel_is_compiled_again(tmp_path: Path) -> None:
    rooms = tmp_path / "rooms"
    for folder in ("high", "low"):
        (rooms / folder).mkdir(parents=True)
    (rooms / "high" / "outer.py").write_text(OUTER)
    inner = rooms / "low" / "inner.py"

    def answer(value: int) -> int:
        inner.write_text(INNER.format(value=value))
        code = "from rooms.high.outer import answer; print(answer())"
        ran = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, check=True)
        return int(ran.stdout)

    assert answer(1) == 2
    [kept, *_] = rooms.rglob("*.nbi")
    time.sleep(0.01)
    assert answer(5) == 2, "numba does not notice"
    remove_stale_kernels(rooms)
    assert not kept.exists()
    assert answer(5) == 6
    remove_stale_kernels(rooms)
    os.utime(inner, (0, 0))
    assert len(list(rooms.rglob("*.nbi"))) == 1, "what is newer stays"
