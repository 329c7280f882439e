"""Figures of drafts inside an engine, as Prometheus reads them."""

from urllib.request import urlopen

from draftstore.engines.figures import DraftFigures, serve_metrics
from tests.fakes.adversaries import tree_of


def test_prometheus_reads_them() -> None:
    figures = DraftFigures("vllm")
    figures.add("", tree_of([(1, 2, 3)]), [0, 1])
    figures.add_sources("", {("rest:chat", "drafted"): 3, ("rest:chat", "matched"): 2})
    figures.add("acme", tree_of([]), [])
    figures.add_sources("acme", {("lookup:acme", "timeout"): 1})
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
