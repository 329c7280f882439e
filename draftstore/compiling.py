"""Compilation across processes: one process at a time compiles a kernel, the others load the cached result."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from numba.core.compiler_lock import global_compiler_lock


def compile_alone(compiled: Any, signature: Any) -> Any:
    """Compile a numba kernel, or load it, while no other process does.

    Otherwise several processes may compile it. Worse, two that cache different signatures at once write them under the
    same number: one's code then runs on the other's arguments.
    """
    with global_compiler_lock, _alone(compiled):
        return type(compiled).compile(compiled, signature)


@contextmanager
def _alone(compiled: Any) -> Iterator[None]:
    """Hold a kernel's lock file, if its folder is writable; processes lock callers before callees."""
    folder = Path(compiled._cache.cache_path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / f"{compiled._cache._impl.filename_base}.lock").open("wb")
    except OSError:
        yield  # nothing can be cached there either
        return
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
