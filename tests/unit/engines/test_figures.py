"""Figures of drafts inside an engine, as Prometheus reads them."""

from urllib.request import urlopen

import numpy as np

from draftstore.drafting.slots import Slots
from draftstore.engines.figures import DraftFigures, serve_metrics
from draftstore.engines.texts import CORPUS, DRAFTS, Texts


def test_prometheus_reads_them() -> None:
    figures = DraftFigures("vllm", ["", "acme"], nodes=3)
    slots, texts = Slots(), Texts()
    labels = np.array([figures.places(["rest:chat"]), figures.places(["lookup:acme"])])
    slots.reason_names.append("timeout")
    slots.wanted = np.array([True, True])
    slots.drafted, slots.matched = np.array([[3], [0]], np.int32), np.array([[2], [0]], np.int32)
    slots.reasons = np.array([[0], [slots.reason_names.index("timeout")]], np.uint8)
    for slot in range(2):
        texts.put(slot, np.array([1], np.int32))
    texts.state[CORPUS], texts.state[DRAFTS] = range(len(texts.state[CORPUS])), 1
    figures.steps[:] = [[1, 3, 2, 1, 1, 0], [1, 0, 0, 0, 0, 0]]
    figures.count_sources(slots, texts, labels, np.array([0, 1]))
    port = serve_metrics(figures, "0")
    text = urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30).read().decode()
    for line in (
        'draftstore_engine_steps_total{corpus="",engine="vllm"} 1.0',
        'draftstore_engine_steps_total{corpus="acme",engine="vllm"} 1.0',
        'draftstore_engine_drafted_tokens_total{corpus="",engine="vllm"} 3.0',
        'draftstore_engine_accepted_tokens_total{corpus="",engine="vllm"} 2.0',
        'draftstore_engine_accepted_tokens_per_position_total{corpus="",engine="vllm",position="1"} 1.0',
        'draftstore_engine_source_drafted_tokens_total{corpus="",engine="vllm",source="rest:chat"} 3.0',
        'draftstore_engine_source_matched_tokens_total{corpus="",engine="vllm",source="rest:chat"} 2.0',
        'empty_drafts_total{corpus="acme",engine="vllm",reason="timeout",source="lookup:acme"} 1.0',
        'draftstore_engine_failures_total{engine="vllm"} 0.0',
    ):
        assert line in text
