"""The part `dresd`: states that a model reads a second, a store of 2 M entries from text to drafts, its drafts live.

The store holds instructions with answers of other models; REST has the same text. Both are asked at equal numbers of
nodes, in a replay of the live model's own outputs.
"""

from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks.batch_runs import Request, run_plain
from benchmarks.dresd_runs import run as replayed
from benchmarks.gpu_bench import Part
from benchmarks.gpu_recycling import run_live
from draftstore.decoding.replay import Recording
from draftstore.drafting.drafter import Drafter
from draftstore.drafting.mixture import Mixture
from draftstore.drafting.projection import Projection
from draftstore.hf.recorded import with_states
from draftstore.hf.states import ModelStates, last_states
from draftstore.stores.dresd.build import DIMS, DresdOptions, DresdProgress, build_dresd
from draftstore.stores.dresd.store import DresdStore

DEPTH = 10


def run(part: Part) -> None:
    """Measure reading in each shape, then the live model's store."""
    for shape in part.extent.shapes:
        part.cell(f"states, {shape}", partial(_read_states, part, shape))
    part.bench.forget()
    store = _store(part)
    if store is None:
        return
    rest = part.bench.rest_of(part.bench.dense_corpus, part.bench.live.text)
    drafters: dict[str, Callable[[], Drafter]] = {
        "DReSD": store.drafter,
        "REST": rest.drafter,
        "DReSD and REST": lambda: Mixture([rest.drafter(), store.drafter()]),
    }
    part.cell("replay", partial(_replay, part, drafters))
    run_live(part, drafters)


def _read_states(part: Part, shape: str) -> dict[str, Any]:
    """Read the recordings with a random model of a shape, projected as for a store."""
    model = part.bench.model(shape)
    texts = [
        np.concatenate([each.prompt, each.output]) for each in part.bench.recordings[: part.extent.texts]
    ]
    hidden = int(model.config.hidden_size)
    weights = np.random.default_rng(0).standard_normal((min(DIMS, hidden), hidden)).astype(np.float32)
    projection = Projection(weights, np.zeros(len(weights), np.float32))
    found: dict[str, Any] = {"shape": shape, "texts": len(texts)}
    for name, taken in (("whole", None), ("projected", projection)):
        list(last_states(model, texts[:2], projection=taken))
        begin = perf_counter()
        states = sum(len(states) for _, states in last_states(model, texts, projection=taken))
        seconds = perf_counter() - begin
        found |= {"states": states, f"{name}_states_per_second": round(states / seconds, 1)}
    return found


def _store(part: Part) -> DresdStore | None:
    """Build the store, which is a cell; a run that finds the cell only opens the store, or builds it unmeasured."""
    bench = part.bench
    loaded = bench.live
    corpus, out = bench.dense_corpus, bench.space.work / "stores" / bench.extent.dense.name
    options = DresdOptions(corpus=(corpus,), name=out.name, dims=min(DIMS, loaded.hidden_size or DIMS))

    def build() -> dict[str, Any]:
        marks: dict[str, float] = {}
        begin = perf_counter()

        def at(step: str) -> Callable[..., None]:
            return lambda *_counts: marks.__setitem__(step, round(perf_counter() - begin, 2))

        told = DresdProgress(at("tokenized"), at("sampled"), at("fitted"), at("embedded"), at("grouped"))
        build_dresd(options, loaded.text, ModelStates(loaded), out, progress=told, overwrite=True)
        seconds = perf_counter() - begin
        manifest = DresdStore.open(out, target_model=loaded.name, tokenizer=loaded.text.identity).manifest
        return {
            "model": loaded.name,
            "seconds": round(seconds, 2),
            "ended_at": marks,
            "counts": manifest.counts,
            "bytes": manifest.size,
            "entries_per_second": round(manifest.counts["entries"] / seconds, 1),
            "quality": manifest.parameters["quality"],
        }

    if part.cell("store", build) is None:
        return None
    build_dresd(options, loaded.text, ModelStates(loaded), out)
    return DresdStore.open(out, target_model=loaded.name, tokenizer=loaded.text.identity)


def _replay(part: Part, drafters: dict[str, Callable[[], Drafter]]) -> dict[str, Any]:
    """Replay the live model's outputs with every drafter at equal numbers of nodes."""
    bench = part.bench
    model: Any = bench.live.model
    requests = [Request(each.prompt, bench.extent.tokens) for each in bench.questions]
    outputs = run_plain(model, requests, 1, "dynamic").outputs
    spoken = [
        Recording(str(place), request.prompt, np.array(output, np.int32))
        for place, (request, output) in enumerate(zip(requests, outputs, strict=True))
    ]
    recordings = list(with_states(model, spoken))
    return {
        "outputs": len(recordings),
        "drafters": {
            name: {
                str(nodes): replayed(drafter(), recordings, DEPTH, budget=nodes)._asdict()
                for nodes in bench.extent.nodes
            }
            for name, drafter in drafters.items()
        },
    }
