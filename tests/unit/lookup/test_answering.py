import gc
import itertools
import json
import logging
import re
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftstore.errors import DraftstoreError
from draftstore.remote import wire
from draftstore.remote.buffer import FrameBuffer
from draftstore.remote.queries import Queries, decode_projection
from draftstore.remote.wire import Frame, Header, Operation, Status
from draftstore.stores.registry import open_store
from services.common.permissions import ANYBODY, Grant, Permissions, hash_token
from services.lookup.figures.counting import SharedCounters
from services.lookup.frames.answering import Answerer
from services.lookup.frames.jobs import DraftJob, ReleaseStats
from services.lookup.limits import Limits
from services.lookup.stores.served import OpenStores, open_served
from services.lookup.stores.targets import Target
from tests.fakes.dense_stores import make_projection
from tests.fakes.lookups import contexts_of
from tests.fakes.waiting import in_threads

SOME = Grant("some", frozenset(["crest"]), hash_token("secret"))


@pytest.fixture(scope="module")
def open_stores(small_crest: Path, small_store: Path, small_dense: Path) -> Iterator[OpenStores]:
    open_stores = OpenStores()
    for name, path in (("crest", small_crest), ("rest", small_store), ("dense", small_dense)):
        open_stores.put(name, open_served(Target(name, path)))
    yield open_stores
    open_stores.close()


@pytest.fixture
def figures() -> SharedCounters:
    return SharedCounters(1)


@pytest.fixture
def answerer(open_stores: OpenStores, figures: SharedCounters) -> Answerer:
    return Answerer(open_stores, Permissions.open_to_all(), Limits(), figures.slot(0))


def frame_of(data: bytes) -> Frame:
    [frame] = FrameBuffer().feed(data)
    return frame


def request(name: str, contexts: np.ndarray, budget: int = 64, number: int = 7, **options: Any) -> Frame:
    return frame_of(wire.encode_request(number, name, contexts, budget, **options))


def finish(job: DraftJob, flags: int = 0) -> bytes:
    """Return the answer to a job that is done, and count it, as a connection does."""
    data = job.encode(flags)
    job.count(len(data))
    return data


def answer(answerer: Answerer, asked: Frame, grant: Grant | None, flags: int = 0) -> bytes:
    """Answer one request from beginning to end."""
    if asked.header.operation != Operation.DRAFT:
        return answerer.answer_other(asked, grant, flags)
    job = answerer.begin(asked, grant, flags)
    if isinstance(job, bytes):
        return job
    job.work(job.batch)
    return finish(job, flags)


def refusal(data: bytes | DraftJob) -> wire.Failure:
    assert isinstance(data, bytes)
    frame = frame_of(data)
    assert frame.header.request_id == 7
    return wire.decode_failure(frame.header, frame.payload)


def zeros(batch: int = 1, width: int = 16) -> np.ndarray:
    return np.zeros((batch, width), np.int32)


@pytest.mark.parametrize("name", ["crest", "rest"])
@given(
    seed=st.integers(0, 1000),
    batch=st.integers(0, 20),
    width=st.integers(0, 20),
    rows=st.lists(st.integers(1, 21), min_size=1, max_size=4),
)
def test_in_pieces_or_at_once_the_answer_is_the_same(
    open_stores: OpenStores, name: str, seed: int, batch: int, width: int, rows: list[int]
) -> None:
    answerer = Answerer(open_stores, Permissions.open_to_all(), Limits(), SharedCounters(1).slot(0))
    contexts = np.random.default_rng(seed).integers(-2, 100, (batch, width)).astype(np.int32)
    asked = request(name, contexts, 1 + seed % 100)
    whole = answer(answerer, asked, ANYBODY)
    job = answerer.begin(asked, ANYBODY)
    assert isinstance(job, DraftJob)
    if not job.left:
        job.work(rows[0])
    for number in itertools.cycle(rows):
        if not job.left:
            break
        job.work(number)
    pieces = finish(job)
    assert pieces[: 16 + 20] == whole[: 16 + 20]
    assert pieces[16 + 24 :] == whole[16 + 24 :]  # all but the duration
    served = open_stores.get(name)
    drafts = served.drafter().draft_batch(contexts, 1 + seed % 100)
    assert whole[40:] == wire.encode_answer(7, 0, 0, 0, drafts)[40:]


def projection_frame(name: bytes) -> Frame:
    return Frame(Header(len(name), 1, Operation.PROJECTION, 0, 0, 7), name)


@given(
    seed=st.integers(0, 1000),
    batch=st.integers(0, 20),
    rows=st.lists(st.integers(1, 21), min_size=1, max_size=4),
)
def test_queries_are_cut_with_their_contexts(
    open_stores: OpenStores, seed: int, batch: int, rows: list[int]
) -> None:
    answerer = Answerer(open_stores, Permissions.open_to_all(), Limits(), SharedCounters(1).slot(0))
    served = open_stores.get("dense")
    assert served.projection is not None
    salad = np.random.default_rng(seed)
    contexts = salad.integers(-2, 300, (batch, 3)).astype(np.int32)
    queries = salad.standard_normal((batch, served.projection.dims)).astype(np.float32)
    queries[salad.random(batch) < 0.3, 0] = np.nan
    asked = request(
        "dense", contexts, 1 + seed % 100, sections=Queries(queries, served.projection).sections()
    )
    whole = answer(answerer, asked, ANYBODY)
    job = answerer.begin(asked, ANYBODY)
    assert isinstance(job, DraftJob)
    for number in itertools.cycle(rows):
        job.work(number)
        if not job.left:
            break
    assert finish(job)[16 + 24 :] == whole[16 + 24 :]
    drafter: Any = served.drafter()
    drafts = drafter.draft_batch(contexts, 1 + seed % 100, queries=queries)
    assert whole[40:] == wire.encode_answer(7, 0, 0, 0, drafts)[40:]


def test_queries_of_another_projection_are_counted_for_their_release(
    answerer: Answerer, figures: SharedCounters
) -> None:
    sections = Queries(np.ones((1, 8), np.float32), make_projection(seed=1)).sections()
    failure = refusal(answer(answerer, request("dense", zeros(), sections=sections), ANYBODY))
    assert (failure.status, failure.retry_after) == (Status.OTHER_PROJECTION, 0)
    assert failure.message.startswith("'dense': queries of the projection ")
    assert figures.totals()["dense"].failures[Status.OTHER_PROJECTION] == 1
    for wrong in ({1: sections[1]}, {3: b"x"}):
        failure = refusal(answer(answerer, request("dense", zeros(), sections=wrong), ANYBODY))
        assert failure.status == Status.BAD_REQUEST
        assert isinstance(answerer.begin(request("rest", zeros(), sections=wrong), ANYBODY), DraftJob)


def test_a_projection(answerer: Answerer, open_stores: OpenStores) -> None:
    served = open_stores.get("dense")
    found = frame_of(answer(answerer, projection_frame(b"dense"), ANYBODY))
    assert (found.header.operation, found.header.status) == (0x84, Status.OK)
    assert served.projection is not None
    assert decode_projection(found.payload).digest == served.projection.digest
    assert decode_projection(found.payload).digest == served.manifest.parameters["projection"]


def test_the_flags_of_an_answer(answerer: Answerer) -> None:
    others = (Frame(Header(0, 1, 3, 0, 0, 7), b""), projection_frame(b"dense"), projection_frame(b"rest"))
    for asked in (request("crest", zeros()), request("none", zeros()), *others):
        for flags in (0, wire.CLOSING):
            assert frame_of(answer(answerer, asked, ANYBODY, flags)).header.flags == flags
    for flags in (0, wire.CLOSING):
        assert frame_of(answerer.greet(Frame(Header(0, 1, 1, 0, 0, 7), b""), flags)[1]).header.flags == flags


@pytest.mark.parametrize(
    ("asked", "grant", "status", "words"),
    [
        (request("crest", zeros()), None, Status.UNAUTHORIZED, "HELLO"),
        (request("rest", zeros()), SOME, Status.FORBIDDEN, "'some' may not use 'rest'"),
        (request("none", zeros()), SOME, Status.FORBIDDEN, "'some' may not use 'none'"),
        (request("none", zeros()), ANYBODY, Status.NOT_FOUND, "'none'"),
        (request("crest", zeros(), strategy="x"), ANYBODY, Status.NOT_FOUND, "unknown strategy 'x'"),
        (request("crest", zeros(513)), ANYBODY, Status.TOO_LARGE, "513 contexts.*at most 512 contexts"),
        (request("crest", zeros(1, 4097)), ANYBODY, Status.TOO_LARGE, "4,097 tokens"),
        (request("crest", zeros(), 4097), ANYBODY, Status.TOO_LARGE, "budget of 4097"),
        (Frame(Header(3, 1, 2, 0, 0, 7), b"abc"), ANYBODY, Status.BAD_REQUEST, "at least 16 bytes"),
        (Frame(Header(0, 1, 9, 0, 0, 7), b""), ANYBODY, Status.BAD_REQUEST, "operation 9 is unknown"),
        (Frame(Header(0, 1, 3, 0, 0, 7), b""), None, Status.UNAUTHORIZED, "HELLO"),
        (projection_frame(b"dense"), None, Status.UNAUTHORIZED, "HELLO"),
        (projection_frame(b"dense"), SOME, Status.FORBIDDEN, "'some' may not use 'dense'"),
        (projection_frame(b"none"), SOME, Status.FORBIDDEN, "'some' may not use 'none'"),
        (projection_frame(b"none"), ANYBODY, Status.NOT_FOUND, "'none'"),
        (projection_frame(b"crest"), SOME, Status.NOT_FOUND, "'crest' has no projection.*of kind 'crest'"),
        (projection_frame(b"\xff"), ANYBODY, Status.BAD_REQUEST, "is not UTF-8"),
        (projection_frame(b"x" * 256), ANYBODY, Status.BAD_REQUEST, "at most 255 bytes, found 256"),
        (
            request("dense", zeros(), strategy="backoff"),
            ANYBODY,
            Status.NOT_FOUND,
            "unknown strategy 'backoff'",
        ),
    ],
)
def test_refusals(
    answerer: Answerer, figures: SharedCounters, asked: Frame, grant: Grant | None, status: Status, words: str
) -> None:
    failure = refusal(answer(answerer, asked, grant))
    assert failure.status == status
    assert failure.retry_after == 0
    assert re.search(words, failure.message)
    totals = figures.totals()
    assert totals.keys() == {""}
    assert totals[""].failures[status] == sum(totals[""].failures) == 1
    assert totals[""].request_bytes == asked.header.length


def test_what_fails_to_draft_says_so_and_no_more(
    answerer: Answerer,
    open_stores: OpenStores,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("services.lookup.frames.jobs._LOG_SECONDS", 3600.0)
    drafter = open_stores.get("crest").drafter()

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(drafter, "draft_batch", fail)
    error: Exception = DraftstoreError("/secret is damaged")
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            failure = refusal(answer(answerer, request("crest", zeros(3)), ANYBODY))
            assert (failure.status, failure.retry_after) == (Status.UNAVAILABLE, 1.0)
            assert "secret" not in failure.message
        [record] = caplog.records  # not once for each request
        assert "/secret is damaged" in record.getMessage()
        assert not record.exc_info
    error = MemoryError()
    failure = refusal(answer(answerer, request("crest", zeros(3)), ANYBODY))
    assert failure.status == Status.INTERNAL


def test_a_job_that_fails_in_the_middle_is_a_failure(
    answerer: Answerer, open_stores: OpenStores, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = answerer.begin(request("rest", zeros(10)), ANYBODY)
    assert isinstance(job, DraftJob)
    job.work(4)
    assert job.left == 6
    monkeypatch.setattr(open_stores.get("rest").drafter(), "draft_batch", lambda *_: 1 / 0)
    job.work(4)
    assert job.left == 0
    assert refusal(finish(job)).status == Status.INTERNAL


def test_releases_that_one_may_use(answerer: Answerer) -> None:
    asked = Frame(Header(0, 1, Operation.RELEASES, 0, 0, 7), b"")
    for grant, names in (
        (ANYBODY, ["crest", "dense", "rest"]),
        (SOME, ["crest"]),
        (Grant("x", frozenset()), []),
    ):
        found = frame_of(answer(answerer, asked, grant))
        assert found.header.operation == 0x83
        assert [entry["name"] for entry in json.loads(found.payload)["releases"]] == names


def test_greetings(open_stores: OpenStores, figures: SharedCounters) -> None:
    answerer = Answerer(open_stores, Permissions([SOME]), Limits(batch=9), figures.slot(0))

    def greet(token: bytes) -> tuple[Grant | None, bytes]:
        return answerer.greet(Frame(Header(len(token), 1, Operation.HELLO, 0, 0, 7), token))

    grant, data = greet(b"secret")
    assert grant == SOME
    assert json.loads(frame_of(data).payload)["limits"]["batch"] == 9
    for token in (b"", b"secret2", b"\xff"):
        grant, data = greet(token)
        assert grant is None
        assert refusal(data).status == Status.UNAUTHORIZED
    answerer.permissions = Permissions.open_to_all()
    assert greet(b"")[0] == ANYBODY


def test_figures_of_a_release(answerer: Answerer, figures: SharedCounters, small_store: Path) -> None:
    contexts = contexts_of(small_store, 30)
    store = open_store(small_store)
    drafts = store.drafter().draft(contexts)
    store.close()
    asked = request("rest", contexts)
    answered = answer(answerer, asked, ANYBODY)
    totals = figures.totals()["rest"]
    assert (totals.queries, totals.contexts) == (1, 30)
    assert totals.nodes == sum(len(draft.tree) for draft in drafts)
    assert totals.misses == sum(not len(draft.tree) for draft in drafts) > 0
    assert totals.matched == sum(draft.match_length for draft in drafts)
    assert (totals.request_bytes, totals.answer_bytes) == (asked.header.length, len(answered))
    answer(answerer, request("rest", zeros(0)), ANYBODY)
    assert figures.totals()["rest"].queries == 2


def test_a_repeated_request_is_answered_as_if_checked(answerer: Answerer, small_crest: Path) -> None:
    first = answerer.begin(request("crest", contexts_of(small_crest, 3)), ANYBODY)
    assert isinstance(first, DraftJob)
    again = wire.encode_request(8, "crest", contexts_of(small_crest, 3)[::-1], 64)
    job = answerer.repeat(again, ANYBODY, first.kind)
    assert job is not None
    job.work(job.batch)
    expected = answer(answerer, frame_of(again), ANYBODY)
    found = finish(job)
    assert wire.decode_answer(found[16:]).drafts == wire.decode_answer(expected[16:]).drafts
    assert found[:32] == expected[:32]


def test_what_was_allowed_once_is_checked_again_when_anything_changed(
    small_crest: Path, small_store: Path, figures: SharedCounters
) -> None:
    opened = OpenStores()
    opened.put("chat", open_served(Target("chat", small_crest), warm=False))
    answerer = Answerer(opened, Permissions.open_to_all(), Limits(), figures.slot(0))
    contexts = contexts_of(small_crest, 1)
    grant = Grant("some", frozenset(["chat"]))
    first = answerer.begin(request("chat", contexts), grant)
    assert isinstance(first, DraftJob)
    data = wire.encode_request(9, "chat", contexts, 64)
    assert answerer.repeat(data, grant, first.kind) is not None
    for other in (None, ANYBODY, Grant("some", frozenset(["chat"]))):
        assert answerer.repeat(data, other, first.kind) is None
    assert answerer.repeat(data, grant, None) is None
    assert answerer.repeat(wire.encode_request(9, "chat", contexts, 65), grant, first.kind) is None
    assert answerer.repeat(data + data, grant, first.kind) is None
    opened.put("chat", open_served(Target("chat", small_store), warm=False))
    assert answerer.repeat(data, grant, first.kind) is None
    opened.remove("chat")
    assert answerer.repeat(data, grant, first.kind) is None
    opened.close()


def test_a_request_that_may_be_repeated_keeps_no_files_mapped(
    small_store: Path, figures: SharedCounters
) -> None:
    opened = OpenStores()
    opened.put("chat", open_served(Target("chat", small_store), warm=False))
    answerer = Answerer(opened, Permissions.open_to_all(), Limits(), figures.slot(0))
    job = answerer.begin(request("chat", zeros()), ANYBODY)
    assert isinstance(job, DraftJob)
    kind, drafter = job.kind, weakref.ref(job.served.drafter())
    del job
    opened.close()
    gc.collect()
    assert kind.served.closed
    assert drafter() is None


def test_requests_with_sections_are_always_looked_at(answerer: Answerer) -> None:
    for name, sections in (("rest", {9: b"abcd"}), ("dense", {})):
        asked = request(name, zeros(), sections=sections)
        job = answerer.begin(asked, ANYBODY)
        assert isinstance(job, DraftJob)
        assert answerer.repeat(wire.HEADER.pack(*asked.header) + asked.payload, ANYBODY, job.kind) is None


def test_threads_may_work_on_jobs(answerer: Answerer, small_crest: Path) -> None:
    contexts = contexts_of(small_crest, 200)
    asked = request("crest", contexts)
    expected = answer(answerer, asked, ANYBODY)[40:]
    jobs = [answerer.begin(asked, ANYBODY) for _ in range(4)]
    in_threads(partial(job.work, 200) for job in jobs if isinstance(job, DraftJob))
    for job in jobs:
        assert isinstance(job, DraftJob)
        assert finish(job)[40:] == expected


def test_costs_follow_what_lookups_take(figures: SharedCounters) -> None:
    line = ReleaseStats(figures.slot(0).release("x"))
    before = line.cost(7, 1)
    line.learn(7, 1, 1.0)
    assert line.cost(7, 1) < 2 * before  # once is no rule
    for _ in range(200):
        line.learn(7, 1, 0.001)
    assert line.cost(7, 1) == pytest.approx(0.001, rel=0.01)
    assert line.cost(6, 1) < 0.0001
    for _ in range(200):
        line.learn(7, 11, 0.003)
    assert line.cost(7, 11) == pytest.approx(0.003, rel=0.01)  # others beside one cost less


def test_pieces_fit_a_slice_and_are_equal(figures: SharedCounters) -> None:
    line = ReleaseStats(figures.slot(0).release("x"))
    line.alone[7], line.each[7] = 1e-4, 2e-5
    assert line.fitting(7, 32, 5e-4) == 16  # not 21 and 11
    assert line.fitting(7, 21, 5e-4) == 21
    assert line.fitting(7, 32, -1.0) == 1
    assert line.fitting(7, 1, 0.0) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"batch": 0},
        {"batch": 65_536},
        {"payload": 1 << 25},
        {"budget": 4097},
        {"context": 70_000},
        {"hello_seconds": -1.0},
        {"waiting": 0},
        {"batch": 1024},
        {"drain_seconds": float("nan")},
    ],
)
def test_limits_that_cannot_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(DraftstoreError, match=r"expected|lower"):
        Limits(**wrong)


def test_the_longest_answer_fits_a_frame(answerer: Answerer) -> None:
    assert Limits().longest_answer <= wire.MAX_PAYLOAD
    assert Limits(batch=1024, budget=2048).longest_answer <= wire.MAX_PAYLOAD
