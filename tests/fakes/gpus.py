"""Tests that wait for a GPU: `python -m benchmarks.gpu --parts tests` runs those of `tests/unit/hf`."""

from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch

Test = TypeVar("Test", bound=Callable[..., Any])
MARKS = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here"))
CUDA = pytest.param("cuda", marks=MARKS)
"""A value of the parameter `device`."""


def needs_gpu(test: Test) -> Test:
    """Mark a test with `MARKS`."""
    for mark in MARKS:
        test = mark(test)
    return test
