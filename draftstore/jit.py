"""Compilation of kernels: functions over arrays, compiled to machine code on first use and cached on disk by numba."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from numba import config, njit, types
from numba.core.cgutils import voidptr_t
from numba.core.compiler_lock import global_compiler_lock
from numba.extending import intrinsic
from numpy.typing import NDArray

from draftstore.storage.locks import lock

CORES: int = config.NUMBA_DEFAULT_NUM_THREADS  # type: ignore[attr-defined]
"""Cores that this process may use."""


def kernel(function: Callable[..., Any]) -> Any:
    """Compile a function on first use; it releases the GIL and is cached on disk if it can be."""
    options: Any = {"nogil": True, "error_model": "numpy"}
    try:
        compiled: Any = njit(cache=True, **options)(function)
    except RuntimeError:  # no folder for a cache
        _warn_without_cache()
        return njit(**options)(function)
    compiled.compile = partial(_compile_alone, compiled)
    return compiled


@cache
def _warn_without_cache() -> None:
    about = "every process compiles its kernels, for up to a minute: set NUMBA_CACHE_DIR to a writable folder"
    logging.getLogger(__name__).warning(about)


def _compile_alone(compiled: Any, signature: Any) -> Any:
    """Compile or load a kernel while no other process does.

    Otherwise several processes may compile it. Worse, two that cache different signatures at the same time write them
    under the same number: the code of one then runs on the arguments of the other.
    """
    with global_compiler_lock, _alone(compiled):
        return type(compiled).compile(compiled, signature)


@contextmanager
def _alone(compiled: Any) -> Iterator[None]:
    """Hold a kernel's lock file if its folder is writable; processes lock callers before callees."""
    folder = Path(compiled._cache.cache_path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{compiled._cache._impl.filename_base}.lock"
        path.touch()
    except OSError:
        yield  # nothing can be cached there either
        return
    with lock(path):
        yield


leaf_kernel = njit(  # type: ignore[call-overload]
    nogil=True, error_model="numpy", _nrt=False, forceinline=True
)
"""The same for kernels that create no arrays.

They do no reference counting and are inlined: in hot loops, counting and passing arrays outweigh the work. They are
cached on disk as part of the kernels that call them, not separately.
"""

reordering_kernel = njit(  # type: ignore[call-overload]
    nogil=True, error_model="numpy", _nrt=False, forceinline=True, fastmath={"reassoc", "contract", "nsz"}
)
"""The same for sums that the compiler may reorder, for speed: their last bits depend on the processor."""


def as_input(array: NDArray[Any], dtype: type[np.generic]) -> NDArray[Any]:
    """Return an array as kernels expect it: contiguous, read-only, of `dtype`. Others trigger compilation."""
    if type(array) is np.ndarray and array.dtype == dtype:
        flags = array.flags
        if flags.c_contiguous and not flags.writeable:
            return array
    return read_only(np.ascontiguousarray(array, dtype))


def read_only(array: NDArray[Any]) -> NDArray[Any]:
    """Return a read-only view so that kernels compile only once for mapped and in-memory arrays."""
    if type(array) is np.ndarray and not array.flags.writeable:
        return array
    view = array.view(np.ndarray)
    view.setflags(write=False)
    return view


def _as_pointer(_context: Any, address: Any) -> Any:
    def build(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], voidptr_t)

    return types.voidptr(address), build


pointer: Any = intrinsic(_as_pointer)
"""Returns an address, int64, as a pointer for `numba.carray`, in kernels."""
