"""CREST in PostgreSQL and LMDB, in a fresh process: `python -m benchmarks.lookupprobe JSON`.

Either the bulk load of entries, or lookups of all backends and of the suffix array on the same contexts. Used by
benchmarks.crest.
"""

import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import psycopg
from numpy.typing import NDArray

from benchmarks.common import SEED, STRATEGY_NAMES
from benchmarks.measure import percentiles, time_calls, time_in_turn, undisturbed
from benchmarks.queryprobe import map_pages
from draftstore.stores.crest.entries import BACKENDS, LMDB, POSTGRES, context_bytes, key_dtype
from draftstore.stores.crest.store import CrestStore
from draftstore.stores.rest.store import RestStore
from schema.copying import copy_statement
from schema.crest_loading import COLUMNS, TYPES, fill_trees
from schema.database import connect
from schema.loading import filling, loading
from schema.trees import PostgresEntries

REPEATS = 3
WARM_UP = 0.1
"""Part of the contexts that is asked before anything is timed."""


def measure_loading(crest: str) -> dict[str, Any]:
    """Load the entries of a store that is in both backends into PostgreSQL again: COPY, key, and all with its check."""
    store = CrestStore.open(crest, backend=LMDB)
    items = list(store.entries.items())
    loaded = CrestStore.open(crest, backend=POSTGRES).entries
    assert isinstance(loaded, PostgresEntries)
    copies, keys, whole = [], [], []
    with connect() as connection:
        for _ in range(REPEATS):
            with loading(connection, loaded.build_id):
                begin = perf_counter()
                with filling(connection, "trees", loaded.build_id) as table:
                    _copy(connection, table, loaded.build_id, items)
                    copies.append(perf_counter() - begin)
                keys.append(perf_counter() - begin - copies[-1])
            begin = perf_counter()
            with loading(connection, loaded.build_id):
                fill_trees(
                    connection,
                    loaded.build_id,
                    store.entries.items(),
                    store.manifest.parameters["entries_sha256"],
                )
            whole.append(perf_counter() - begin)
        version = connection.execute("SHOW server_version").fetchone()
    return {
        "postgres": version[0] if version else "",
        "rows": len(items),
        "copy_rows_per_second": round(len(items) / median(copies)),
        "key_seconds": round(median(keys), 3),
        "copy_and_key_rows_per_second": round(len(items) / (median(copies) + median(keys))),
        "checked_load_rows_per_second": round(len(items) / median(whole)),
    }


def _copy(
    connection: psycopg.Connection[Any], table: str, build_id: int, items: Sequence[tuple[bytes, bytes]]
) -> None:
    """Send rows by binary COPY."""
    statement = copy_statement(table, COLUMNS, "binary", freeze=True)
    with connection.cursor() as cursor, cursor.copy(statement) as copy:
        copy.set_types(TYPES)
        for key, value in items:
            copy.write_row((build_id, key, value))


def measure_lookups(rest: str, crest: str, contexts: str) -> dict[str, Any]:
    """Draft for the same contexts from everywhere, in turn and each alone, from one core.

    The order is drawn anew for every context, so that each follows each of the others equally often.
    """
    asked = np.load(contexts)
    calls = _systems(Path(rest), Path(crest), asked)
    warm = int(len(asked) * WARM_UP)
    for each in calls.values():
        time_calls(each[:warm])
    with undisturbed():
        times = time_in_turn({name: each[warm:] for name, each in calls.items()}, np.random.default_rng(SEED))
        alone = {name: time_calls(each[warm:]) for name, each in calls.items()}
    return {
        "contexts": len(asked) - warm,
        "entries": CrestStore.open(crest).manifest.counts["entries"],
        "in_turn_us": {name: percentiles(each) for name, each in times.items()},
        "alone_us": {name: percentiles(each) for name, each in alone.items()},
    }


def _systems(rest: Path, crest: Path, contexts: NDArray[np.int32]) -> dict[str, list[Callable[[], object]]]:
    """Return what is timed: a call for each context."""
    index = RestStore.open(rest)
    map_pages(index.index)
    stores = {backend: CrestStore.open(crest, backend=backend) for backend in BACKENDS}
    drafters: dict[str, Any] = {
        f"{backend} {strategy}": store.drafter(strategy)
        for backend, store in stores.items()
        for strategy in STRATEGY_NAMES
    }
    drafters |= {f"suffix array {strategy}": index.drafter(strategy) for strategy in STRATEGY_NAMES}
    for drafter in drafters.values():
        drafter.warm_up()
    sum(len(value) for _, value in stores[LMDB].entries.items())  # its pages, too, are in memory
    calls: dict[str, list[Callable[[], object]]] = {
        name: [drafter.session(context[context >= 0]).propose for context in contexts]
        for name, drafter in drafters.items()
    }
    max_n = stores[LMDB].manifest.parameters["max_n"]
    keys = _keys(contexts, max_n, stores[LMDB].manifest.vocab_size)
    for backend, store in stores.items():
        calls[f"{backend} get {max_n} keys"] = [partial(store.entries.get, asked) for asked in keys]
    return calls


def _keys(contexts: NDArray[np.int32], max_n: int, vocab_size: int) -> list[list[bytes]]:
    """Return the keys of the last 1 .. max_n tokens of every context, longest first."""
    dtype = key_dtype(vocab_size)
    encoded = context_bytes(np.ascontiguousarray(contexts[:, -max_n:]), dtype)
    return [[row[max_n - n :].tobytes() for n in range(max_n, 0, -1)] for row in encoded]


if __name__ == "__main__":
    arguments = json.loads(sys.argv[1])
    measure: Any = {"loading": measure_loading, "lookups": measure_lookups}[arguments.pop("what")]
    print(json.dumps(measure(**arguments)))
