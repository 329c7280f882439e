"""Projection of hidden states to queries, bit-identical on every processor and for every batch size."""

from typing import Any

import numpy as np

from draftstore.jit import kernel
from draftstore.stores.dresd.kernels.cosines import dot


@kernel
def project(weights: Any, bias: Any, states: Any) -> Any:
    """Return float32 [batch, dims]: weights [dims, hidden_size] @ state + bias [dims] for states [batch, hidden_size].

    All are float32. A state with a value that is not finite gives no finite number.
    """
    queries = np.empty((len(states), len(bias)), np.float32)
    for dim in range(len(bias)):
        for row in range(len(states)):
            queries[row, dim] = dot(weights, dim, states[row]) + bias[dim]
    return queries
