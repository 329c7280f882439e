"""Round trips of one caller, each compared with its minimum cost: an echo, and the lookup without a service."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.common import SEED
from benchmarks.measure import percentiles, time_in_turn
from benchmarks.service.echo import HEADER, Caller, echo_frame
from draftstore.remote.client import RemoteStore
from draftstore.remote.wire import encode_request
from draftstore.stores.registry import open_store
from draftstore.trees.frontier import BUDGET


def roundtrips(address: str, echo: str, name: str, path: Path, contexts: NDArray[np.int32]) -> dict[str, Any]:
    """Time all kinds of calls for one store, in microseconds; contexts are int32 [requests, contexts, width]."""
    store: Any = open_store(path)
    remote = RemoteStore(address, name, deadline=5.0)
    remote.check()
    local, client, bare = store.drafter(), remote.drafter(), Caller(echo)
    service = Caller(address)
    frames = [encode_request(0, name, batch, BUDGET, 0.0, "") for batch in contexts]
    sizes = [len(service.ask(request)) - HEADER.size for request in frames]
    service.close()
    echoed = [echo_frame(request, size) for request, size in zip(frames, sizes, strict=True)]
    wrong = sum(client.draft(batch, BUDGET) != local.draft(batch, BUDGET) for batch in contexts)
    calls: Mapping[str, list[Callable[[], object]]] = {
        "client": [partial(client.draft_batch, batch, BUDGET) for batch in contexts],
        "echo": [partial(bare.ask, request) for request in echoed],
        "in process": [partial(local.draft_batch, batch, BUDGET) for batch in contexts],
    }
    times = time_in_turn(calls, np.random.default_rng(SEED))
    remote.close()
    found = {
        f"{kind}_{key}": percentiles(each)[key] for kind, each in times.items() for key in ("p50", "p99")
    }
    return {
        "store": name,
        "contexts": contexts.shape[1],
        **found,
        "ratio": round(found["client_p50"] / (found["echo_p50"] + found["in process_p50"]), 2),
        "wrong": wrong,
    }
