"""Dot products of rows. Compilers may reorder their additions: the last bits depend on the processor.

Numba has no float16: rows are read as their bits, and the exponent, 112 lower than that of a float32, is corrected.
"""

import numpy as np

from draftstore.jit import kernel, reordering_kernel

_FRACTION = 13
"""Bits that a float32 has more in its fraction."""
_EXPONENT = np.int32(~0x70000000)
"""Clears the exponent's sign bits that a shift of the sign has filled."""
_SCALE = np.float32(2.0**112)


@reordering_kernel
def dot(rows, row, query):
    """Return the dot product of a row of float32 [any, dims] and a query, float32 [dims]."""
    total = np.float32(0.0)
    for i in range(len(query)):
        total += rows[row, i] * query[i]
    return total


@reordering_kernel
def half_dot(rows, row, query):
    """Return the same for rows of float16, as their bits, uint16 [any, dims]."""
    total = np.float32(0.0)
    for i in range(len(query)):
        bits = np.int32(np.int32(np.int16(rows[row, i])) << _FRACTION & _EXPONENT)
        total += bits.view(np.float32) * _SCALE * query[i]
    return total


@kernel
def project(weights, bias, states):
    """Return float32 [batch, dims]: weights [dims, hidden_size] @ state + bias [dims] for states [batch, hidden_size].

    All are float32. A state gives the same numbers in every batch; one with a value that is not finite, no finite one.
    """
    queries = np.empty((len(states), len(bias)), np.float32)
    for dim in range(len(bias)):
        for row in range(len(states)):
            queries[row, dim] = dot(weights, dim, states[row]) + bias[dim]
    return queries
