"""Opening and asking a store, in a fresh process: `python -m benchmarks.queryprobe JSON`.

Either the resident memory at every step, or times. Imports beyond numba wait inside the functions: memory is
told apart from that of a process that has imported numba and nothing else. Used by benchmarks.scale.
"""

import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numba  # noqa: F401 (part of the base line)
import numpy as np

from benchmarks.measure import percentiles, pin_to_one_core, resident, resident_of, time_calls, undisturbed

OPENINGS = 20
BATCH = 32
BATCHES = 100
PAGE = 4096


def measure_memory(store: str, contexts: str, strategy: str, queries: int) -> dict[str, Any]:
    """Return resident bytes at every step: store opened, kernels loaded, queries answered.

    `anonymous` and `mapped` are beyond the base line; `store` is the part of `mapped` in the store's files.
    """
    pin_to_one_core()
    base = resident()
    steps: dict[str, Any] = {"base": base}

    def note(step: str) -> None:
        grown = {key: value - base[key] for key, value in resident().items()}
        steps[step] = grown | {"store": resident_of(Path(store))}

    from draftstore.stores.rest.store import RestStore

    opened = RestStore.open(store)
    note("opened")
    drafter = opened.drafter(strategy)
    drafter.warm_up()
    note("kernels")
    prompts = np.load(contexts)[:queries]
    times = time_calls([drafter.session(prompt[prompt >= 0]).propose for prompt in prompts])
    note("queried")
    steps["first_queries_us"] = percentiles(times)
    return steps


def measure_queries(store: str, contexts: str, strategies: list[str]) -> dict[str, Any]:
    """Time opening, single drafts and batches on one core, with the store's pages mapped and in memory."""
    from draftstore.drafting.drafter import propose_batch
    from draftstore.stores.rest.store import RestStore

    prompts = np.load(contexts)
    with undisturbed():
        openings = time_calls([lambda: RestStore.open(store)] * OPENINGS)
        opened = RestStore.open(store)
        map_pages(opened.index)
        answer: dict[str, Any] = {"open_ms": round(median(openings) / 1000, 3), "openings": OPENINGS}
        for name in strategies:
            drafter = opened.drafter(name)
            drafter.warm_up()
            sessions = [drafter.session(prompt[prompt >= 0]) for prompt in prompts]
            groups = [sessions[i : i + BATCH] for i in range(0, len(sessions) - BATCH + 1, BATCH)][:BATCHES]
            times = time_calls([session.propose for session in sessions])  # first: each context is new
            batches = time_calls([partial(propose_batch, drafter, group) for group in groups])
            singles = time_calls([partial(_propose_each, group) for group in groups])
            answer[name] = {
                "query_us": percentiles(times),
                "nodes_mean": round(float(np.mean([len(session.propose()) for session in sessions])), 1),
                "batch": {
                    "size": BATCH,
                    "batches": len(groups),
                    "one_call_us": round(median(batches), 1),
                    "single_calls_us": round(median(singles), 1),
                },
            }
    return answer


def _propose_each(sessions: Sequence[Any]) -> None:
    """Ask many sessions one by one."""
    for session in sessions:
        session.propose()


def map_pages(index: Any) -> None:
    """Read one byte of every page of a store's arrays, as a server that has run for a while has done."""
    for array in index[:5]:
        array.reshape(-1).view(np.uint8)[::PAGE].max(initial=0)


if __name__ == "__main__":
    arguments = json.loads(sys.argv[1])
    measure: Any = {"memory": measure_memory, "queries": measure_queries}[arguments.pop("what")]
    print(json.dumps(measure(**arguments)))
