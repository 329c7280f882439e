"""Processes that end with the one that started them."""

import ctypes
import signal

_PRCTL = getattr(ctypes.CDLL(None), "prctl", None)
_SET_PARENT_DEATH_SIGNAL = 1


def end_with_parent() -> None:
    """Have this process killed when the one that started it ends, however that happens; elsewhere than on Linux not."""
    if _PRCTL is not None:
        _PRCTL(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
