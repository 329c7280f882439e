"""How kernels are compiled: plain functions over arrays, machine code on first use, kept on disk by numba."""

import fcntl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numba import config, extending, njit
from numba.core.compiler_lock import global_compiler_lock
from numpy.typing import NDArray

CORES: int = config.NUMBA_DEFAULT_NUM_THREADS  # type: ignore[attr-defined]
"""Cores that this process may use."""


def kernel(function: Callable[..., Any]) -> Any:
    """Compile a function on first use; it releases the interpreter lock, and is kept on disk."""
    compiled: Any = njit(cache=True, nogil=True, error_model="numpy")(function)
    compiled.compile = partial(_compile, compiled)
    return compiled


def _compile(compiled: Any, signature: Any) -> Any:
    """Compile a kernel in one process at a time; the others load what it kept.

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


leaf_kernel = njit(  # type: ignore[call-overload]
    nogil=True, error_model="numpy", _nrt=False, forceinline=True
)
"""The same for kernels that create no arrays.

They count no references and become part of their callers: in hot loops, counting and passing arrays outweigh the work.
As parts they are kept on disk with the kernels that call them, not by themselves.
"""

intrinsic: Any = extending.intrinsic
"""Makes a kernel of a function that writes machine code: for what numba has no words for."""


def as_input(array: NDArray[Any], dtype: type[np.generic]) -> NDArray[Any]:
    """Return an array as kernels take it: contiguous, read-only and of one type. They compile anew for any other."""
    return read_only(np.ascontiguousarray(array, dtype))


def read_only(array: NDArray[Any]) -> NDArray[Any]:
    """Return a read-only view: kernels compile once for mapped and in-memory arrays alike."""
    view = array.view(np.ndarray)
    view.setflags(write=False)
    return view
