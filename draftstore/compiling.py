"""How kernels get their machine code: one process at a time compiles a kernel, the others load what it kept."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from numba.core.compiler_lock import global_compiler_lock


def compile_alone(compiled: Any, signature: Any) -> Any:
    """Compile a kernel of numba, or load it, while no other process does.

    By itself numba lets each of them compile. Worse, two that keep different signatures at once write them under the
    same number: the code of one is then run on the arguments of the other.
    """
    with global_compiler_lock, _alone(compiled):
        return type(compiled).compile(compiled, signature)


@contextmanager
def _alone(compiled: Any) -> Iterator[None]:
    """Hold the lock of a kernel, where its folder has room for one; processes take it from the caller to the callee."""
    folder = Path(compiled._cache.cache_path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / f"{compiled._cache._impl.filename_base}.lock").open("wb")
    except OSError:
        yield  # nothing can be kept there either
        return
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
