"""What the load generator and others need of sockets and frames: the header, connecting, a timer."""

import ctypes
import os
import socket
import struct
import time
from contextlib import suppress

HEADER = struct.Struct("<IBBBBQ")
"""Of a frame: bytes of the payload, version, operation, status, flags, request id."""


def connect(address: str) -> socket.socket:
    """Connect to a Unix socket or to host:port; the socket blocks.

    Raises:
        OSError: nobody answers.
    """
    if "/" in address:
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.connect(address)
        except OSError:
            sock.close()
            raise
        return sock
    host, _, port = address.rpartition(":")
    sock = socket.create_connection((host, int(port)), timeout=5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


class Timer:
    """A timer of the kernel that wakes an epoll at even distances; the time limit of `poll` is in milliseconds.

    `os.timerfd_create` comes with Python 3.13 only.
    """

    def __init__(self, seconds: float) -> None:
        """Fire every so many seconds, at most every 20 µs."""
        libc = ctypes.CDLL(None, use_errno=True)
        self.fd = libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        whole, nanos = divmod(max(20_000, int(seconds * 1e9)), 1_000_000_000)
        setting = (ctypes.c_long * 4)(whole, nanos, whole, nanos)
        if self.fd < 0 or libc.timerfd_settime(self.fd, 0, setting, None):
            raise OSError(ctypes.get_errno(), "no timer")

    def clear(self) -> None:
        """Take note that it has fired."""
        with suppress(BlockingIOError):
            os.read(self.fd, 8)

    def close(self) -> None:
        """Stop."""
        os.close(self.fd)
