import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftstore.remote.repeats import FixedBytes
from draftstore.remote.wire import HEADER, encode_request


def asked(number: int, contexts: np.ndarray, budget: int = 64) -> bytes:
    return encode_request(number, "chat-ä", contexts, budget, 0.25, "backoff")


@given(st.integers(0, 2**64 - 1), st.integers(1, 5), st.integers(0, 20), st.integers(0, 2**32 - 1))
def test_a_repeated_request_has_the_same_bytes(number: int, batch: int, width: int, seed: int) -> None:
    contexts = np.random.default_rng(seed).integers(-1, 2**31, (batch, width)).astype(np.int32)
    fixed = FixedBytes(asked(3, np.zeros((batch, width), np.int32)), (batch, width))
    data = asked(number, contexts)
    assert fixed.frame(number, contexts) == data
    found = fixed.match(data)
    assert found is not None
    assert found[0] == number
    assert np.array_equal(found[1], contexts)


def test_a_request_that_differs_elsewhere_is_another() -> None:
    contexts = np.arange(32, dtype=np.int32).reshape(2, 16)
    data = asked(3, contexts)
    fixed = FixedBytes(data, contexts.shape)
    same = {*range(8, 16), *range(HEADER.size + 16, HEADER.size + 16 + contexts.nbytes)}
    for place in range(len(data)):
        other = bytearray(data)
        other[place] ^= 1
        assert (fixed.match(bytes(other)) is None) == (place not in same)
    for wrong in (data[:-1], data + b"x", data + data, b"", asked(3, contexts, 63), asked(3, contexts[:1])):
        assert fixed.match(wrong) is None


@pytest.mark.parametrize("strided", [np.zeros((4, 32), np.int32)[::2, ::2], np.zeros((16, 2), np.int32).T])
def test_contexts_may_lie_anyhow(strided: np.ndarray) -> None:
    fixed = FixedBytes(asked(1, np.ascontiguousarray(strided)), strided.shape)
    assert fixed.frame(1, strided) == asked(1, strided)
