import os
import time
from pathlib import Path

from draftstore.remote.wire import Status, frame
from services.lookup.figures import words
from services.lookup.figures.counting import SharedCounters
from services.lookup.figures.metrics import metrics_text, resident_bytes
from services.lookup.figures.totals import Labels, WorkerState
from tests.fakes.lookups import contexts_of, failure
from tests.fakes.served import Samples, read_samples, served
from tests.fakes.waiting import until

STATUSES = ("not_found", "bad_request")


def sample(samples: Samples, name: str, **labels: str) -> float:
    return samples[f"draftstore_{name}", tuple(sorted(labels.items()))]


def test_figures_become_metrics() -> None:
    figures = SharedCounters(2)
    for number in range(2):
        slot = figures.slot(number)
        slot.begin()
        slot.state = WorkerState.READY
        slot.announce([("chat", Labels("crest", "b1", "t1"))])
        slot.release("chat").record(3, [5, 0, 2], 70, 1, 200, 900, 80e-6)
        slot.connections = 3
    slot.announce([("chat", Labels("crest", "b1", "t1")), ("code", Labels("rest", "b2", "t2"))])
    slot.release("chat").fail(Status.BUSY)
    slot.release("chat").swapped()
    slot.restarted()
    found = read_samples(metrics_text(figures))
    chat = {"release": "chat"}
    assert sample(found, "queries_total", **chat) == 2
    assert sample(found, "contexts_total", **chat) == 6
    assert sample(found, "misses_total", **chat) == 2
    assert sample(found, "nodes_total", **chat) == 140
    assert sample(found, "request_bytes_total", **chat) == 400
    assert sample(found, "answer_bytes_total", **chat) == 1800
    assert sample(found, "swaps_total", **chat) == 1
    assert sample(found, "failures_total", status="busy", **chat) == 1
    assert sample(found, "failures_total", status="internal", **chat) == 0
    assert sample(found, "ready", **chat) == 1
    assert sample(found, "ready", release="code") == 0  # one worker of two
    assert sample(found, "release_info", kind="crest", build="b1", tokenizer="t1", **chat) == 1
    assert sample(found, "connections", worker="0") == sample(found, "connections", worker="1") == 3
    assert sample(found, "worker_up", worker="0") == 1
    assert [sample(found, "worker_restarts_total", worker=worker) for worker in "01"] == [0, 1]
    assert sample(found, "resident_memory_bytes", process="worker-0", kind="anonymous") > 1 << 20


def test_how_far_the_catalogue_is_followed() -> None:
    figures = SharedCounters(3)
    now = time.time()
    for number, read_at, away in ((0, now, False), (1, now - 600, True), (2, None, False)):
        figures.slot(number).begin()
        figures.slot(number).follow(read_at, away=away)
    found = read_samples(metrics_text(figures))
    assert sample(found, "catalogue_age_seconds", worker="0") < 300
    assert 600 <= sample(found, "catalogue_age_seconds", worker="1") < 900
    assert [sample(found, "catalogue_up", worker=worker) for worker in "01"] == [1, 0]
    assert ("draftstore_catalogue_up", (("worker", "2"),)) not in found  # directories alone
    slot = figures.slot(0)
    slot.follow(None, away=True)
    slot.end()
    assert slot.catalogue_read  # what follows a dead worker knows that it knew


def test_a_worker_without_a_sign_of_life_serves_nothing() -> None:
    figures = SharedCounters(1)
    slot = figures.slot(0)
    slot.begin()
    slot.state = WorkerState.READY
    slot.announce([("chat", Labels("rest", "b", "t"))])
    assert sample(read_samples(metrics_text(figures)), "ready", release="chat") == 1
    slot._words[words.HEARTBEAT] -= 11 * 10**9
    found = read_samples(metrics_text(figures))
    assert sample(found, "ready", release="chat") == sample(found, "worker_up", worker="0") == 0


def test_stores_that_cannot_be_opened_are_counted(small_store: Path, tmp_path: Path) -> None:
    stores = ("--store", f"small={small_store}", "--store", f"gone={tmp_path}")
    with served(*stores, "--wait", "--poll-seconds", "0.1") as service:
        until(lambda: service.metric("draftstore_open_failures_total", release="gone") >= 2)
        assert service.metric("draftstore_open_failures_total", release="small") == 0
        assert service.metric("draftstore_ready", release="gone") == 0


def test_histograms_add_up() -> None:
    figures = SharedCounters(1)
    release = figures.slot(0).release("chat")
    for seconds, match in ((10e-6, 0), (60e-6, 4), (0.5, 16), (0.5, 99)):
        release.record(1, [match], 0, 0, 0, 0, seconds)
    found = read_samples(metrics_text(figures))
    buckets = [
        sample(found, "lookup_seconds_bucket", release="chat", le=le) for le in ("2.5e-05", "7.5e-05", "0.1")
    ]
    assert buckets == [1, 2, 2]
    for name in ("lookup_seconds", "batch_size", "match_length"):
        assert sample(found, f"{name}_bucket", release="chat", le="+Inf") == 4
        assert sample(found, f"{name}_count", release="chat") == 4
    assert sample(found, "match_length_bucket", release="chat", le="4") == 2
    assert sample(found, "match_length_bucket", release="chat", le="16") == 3


def test_names_that_need_escaping() -> None:
    figures = SharedCounters(1)
    figures.slot(0).release('a"b\\c\nd').fail(Status.BUSY)
    found = read_samples(metrics_text(figures))
    assert sample(found, "failures_total", release='a"b\\c\nd', status="busy") == 1


def test_memory_of_a_process() -> None:
    found = resident_bytes(os.getpid())
    assert found["anonymous"] > 1 << 20
    assert found["file"] > 1 << 20
    assert resident_bytes(1 << 30) == {}


def test_totals_are_what_was_asked(small_store: Path, small_crest: Path) -> None:
    with served(
        "--store", f"rest={small_store}", "--store", f"crest={small_crest}", "--workers", "2"
    ) as service:
        contexts = contexts_of(small_store, 12)
        asked, sizes, misses, nodes, matched = 0, 0, 0, 0, 0
        for _ in range(6):  # connections are shared out between the workers
            with service.caller() as caller:
                for batch in (1, 2, 12):
                    drafts = caller.draft("rest", contexts[:batch], budget=8).drafts
                    asked += 1
                    sizes += batch
                    nodes += sum(len(draft.tree.tokens) for draft in drafts)
                    misses += sum(not len(draft.tree.tokens) for draft in drafts)
                    matched += sum(draft.match_length for draft in drafts)
                caller.draft("crest", contexts[:1])
                failure(caller.draft_frame("nowhere", contexts[:1]))
                failure(caller.draft_frame("rest", contexts[:1], strategy="worst"))
                failure(caller.ask(frame(99, caller.next_id())))
        found = service.samples()
        rest = {"release": "rest"}
        assert sample(found, "queries_total", **rest) == asked
        assert sample(found, "contexts_total", **rest) == sizes
        assert sample(found, "misses_total", **rest) == misses
        assert sample(found, "nodes_total", **rest) == nodes
        assert sample(found, "match_length_sum", **rest) == matched
        assert sample(found, "batch_size_bucket", le="1", **rest) == 6
        assert sample(found, "batch_size_bucket", le="2", **rest) == 12
        assert sample(found, "lookup_seconds_count", **rest) == asked
        assert 0 < sample(found, "lookup_seconds_sum", **rest) < 60
        assert sample(found, "queries_total", release="crest") == 6
        failures = {
            labels: count for (name, labels), count in found.items() if name == "draftstore_failures_total"
        }
        by_status = [sum(c for labels, c in failures.items() if ("status", s) in labels) for s in STATUSES]
        assert by_status == [12, 6]
        assert sum(failures.values()) == 18
        assert sample(found, "ready", **rest) == 1
        assert "nowhere" not in {dict(labels).get("release") for _, labels in found}
