"""Processes that end with their parent."""

import ctypes
import signal

_PRCTL = getattr(ctypes.CDLL(None), "prctl", None)
_SET_PARENT_DEATH_SIGNAL = 1


def end_with_parent() -> None:
    """Have this process killed when its parent ends, for whatever reason; Linux only."""
    if _PRCTL is not None:
        _PRCTL(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
