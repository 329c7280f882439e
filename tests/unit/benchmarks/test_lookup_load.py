"""The load generator of the benchmarks, on a small real service: it sees what is wrong, late or lost."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("psutil")
pytest.importorskip("uvloop")

from benchmarks.echo import echo_plan, echo_server
from benchmarks.loadgen import Load
from benchmarks.loadplan import DURATION, LoadPlan, Question, make_plan
from benchmarks.loadrun import RunningLoad, run_load
from benchmarks.service import Service, anonymous_bytes, running
from draftstore.stores.rest.store import RestStore

REST, CREST = "small-rest", "small-crest"


@pytest.fixture(scope="module")
def stores(small_store: Path, small_crest: Path) -> dict[str, Path]:
    return {REST: small_store, CREST: small_crest}


@pytest.fixture(scope="module")
def service(stores: dict[str, Path]) -> Iterator[Service]:
    with running(stores) as service:
        yield service


@pytest.fixture(scope="module")
def plan(stores: dict[str, Path]) -> LoadPlan:
    """Return a plan for both stores, with batches of one and of five."""
    questions = [
        Question(REST, "backoff", contexts(stores[REST], 40, 1)),
        Question(CREST, "longest", contexts(stores[REST], 20, 5)),
        Question(CREST, "", contexts(stores[REST], 20, 1), budget=7, min_prob=0.01),
    ]
    return make_plan(questions, {name: [path] for name, path in stores.items()})


def contexts(rest: Path, count: int, batch: int) -> NDArray[np.int32]:
    """Return int32 [count, batch, 16]: six tokens of a store's text each, padded with -1."""
    tokens = np.asarray(RestStore.open(rest).index.tokens).astype(np.int32)
    windows = np.lib.stride_tricks.sliding_window_view(tokens, 6)
    windows = windows[windows.max(axis=1) < 384]  # inside one document
    drawn = windows[np.random.default_rng(batch).integers(0, len(windows), count * batch)]
    return np.pad(drawn, ((0, 0), (10, 0)), constant_values=-1).reshape(count, batch, 16)


def saved(plan: LoadPlan, tmp_path: Path) -> str:
    path = tmp_path / "plan.npz"
    plan.save(path)
    return str(path)


def test_a_plan_is_read_as_it_was_written(plan: LoadPlan, tmp_path: Path) -> None:
    found = LoadPlan.load(Path(saved(plan, tmp_path)))
    assert found.frames == plan.frames
    assert found.answers == plan.answers
    assert found.names == plan.names
    assert found.kinds.tolist() == plan.kinds.tolist()


def test_a_right_service_has_no_problems(service: Service, plan: LoadPlan, tmp_path: Path) -> None:
    found = run_load(Load(service.address, saved(plan, tmp_path), seconds=5.0, connections=6))
    assert found["answers"] > 0
    assert found["problems"] == {}
    assert found["wrong"] == 0
    assert len(found["builds"]) == 2
    assert sum(found["builds"].values()) == found["answers"]
    assert all(kind["latency_us"]["samples"] > 0 for kind in found["by_kind"])
    assert found["latency_us"]["p50"] <= found["latency_us"]["p99"] <= found["latency_us"]["p99.9"]


@pytest.mark.parametrize("place", [DURATION.stop, -1])
def test_one_wrong_byte_is_seen(service: Service, plan: LoadPlan, tmp_path: Path, place: int) -> None:
    planted = LoadPlan(plan.frames, plan.kinds, plan.names, [dict(answers) for answers in plan.answers])
    build, answer = next(iter(planted.answers[3].items()))
    changed = bytearray(answer)
    changed[place] ^= 1
    planted.answers[3][build] = bytes(changed)
    found = run_load(Load(service.address, saved(planted, tmp_path), seconds=5.0, connections=2))
    assert found["wrong"] >= 1
    assert set(found["problems"]) <= {"wrong: another draft", "wrong: damaged"}
    assert found["answers"] > found["wrong"]


def test_a_build_that_may_not_answer_is_wrong(service: Service, plan: LoadPlan, tmp_path: Path) -> None:
    answers = [{build ^ 1: answer for build, answer in each.items()} for each in plan.answers]
    other = LoadPlan(plan.frames, plan.kinds, plan.names, answers)
    found = run_load(Load(service.address, saved(other, tmp_path), seconds=5.0, connections=2))
    assert found["answers"] == 0
    assert set(found["problems"]) == {"wrong: unknown build"}
    assert found["wrong"] == found["problems"]["wrong: unknown build"] > 0


def test_an_answer_of_two_builds_is_told_from_others(stores: dict[str, Path]) -> None:
    question = Question("any", "backoff", contexts(stores[REST], 1, 6))
    plan = make_plan([question], {"any": list(stores.values())})
    (answers,) = plan.answers
    builds = list(answers)
    rows = [split(answers[build]) for build in builds]
    assert rows[0] != rows[1]
    mixed = [*rows[0][:3], *rows[1][3:]]
    head = answers[builds[0]][:24]
    table = b"".join(np.array([row[i] for row in mixed], "<u4").tobytes() for i in range(3))
    assert plan.explain(0, head + table + b"".join(row[3] for row in mixed)) == "wrong: builds mixed"
    assert plan.explain(0, answers[builds[0]][:-1]) == "wrong: damaged"


def split(payload: bytes) -> list[tuple[int, int, int, bytes]]:
    """Return for each draft of an answer the bytes of its tree, match length, match count and the tree."""
    batch = int.from_bytes(payload[16:18], "little")
    table = np.frombuffer(payload, "<u4", 3 * batch, 24).reshape(3, batch).tolist()
    stops = np.cumsum(table[0]).tolist()
    trees = payload[24 + 12 * batch :]
    return [
        (table[0][i], table[1][i], table[2][i], trees[stop - table[0][i] : stop])
        for i, stop in enumerate(stops)
    ]


def test_what_is_refused_is_no_answer(service: Service, plan: LoadPlan, tmp_path: Path) -> None:
    frames = [frame.replace(REST.encode(), b"other-rest") for frame in plan.frames]
    other = LoadPlan(frames, plan.kinds, plan.names, plan.answers)
    found = run_load(Load(service.address, saved(other, tmp_path), seconds=5.0, connections=2))
    assert set(found["problems"]) == {"NOT_FOUND"}
    assert found["wrong"] == 0
    assert found["answers"] > 0


def test_a_stall_makes_all_late_that_fell_due_in_it(service: Service, plan: LoadPlan, tmp_path: Path) -> None:
    trace = tmp_path / "trace.npz"
    load = Load(
        service.address, saved(plan, tmp_path), seconds=2.0, connections=4, rate=100.0, trace=str(trace)
    )
    running_load = RunningLoad(load)
    time.sleep(1.0)
    workers = service.workers()
    assert workers
    for pid in workers:
        os.kill(pid, signal.SIGSTOP)
    stopped = time.monotonic()
    time.sleep(0.5)
    resumed = time.monotonic()
    for pid in workers:
        os.kill(pid, signal.SIGCONT)
    found = running_load.result()
    unsent = found["problems"].pop("never sent", 0)  # where the generator itself was held up at the end
    assert found["problems"] == {}
    assert found["answers"] + unsent == pytest.approx(200, abs=2)
    late = found["latency_us"]["late"]
    begin = found["begin"] + load.warm_up
    stall = min(resumed - 0.05, begin + load.seconds) - max(stopped, begin)  # as it was, on a busy machine
    assert 100 * stall - 5 - unsent <= late["50 ms"] <= late["2 ms"] <= 202
    if stall > 0.2:  # four were sent, the others waited their turn
        assert found["since_sent_us"]["late"]["50 ms"] < late["50 ms"]
    with np.load(trace) as arrays:
        assert np.all(np.diff(np.sort(arrays["due"])) == pytest.approx(0.01))
        assert int((arrays["latency"] > 0.05).sum()) == late["50 ms"]


def test_killed_workers_lose_what_they_had_in_hand(
    stores: dict[str, Path], plan: LoadPlan, tmp_path: Path
) -> None:
    with running(stores, workers=2) as service:
        running_load = RunningLoad(Load(service.address, saved(plan, tmp_path), seconds=300, connections=4))
        time.sleep(1.5)
        killed = time.monotonic()
        pids = service.workers()
        # All at once: none takes over the connections of another.
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in pids:
                os.kill(pid, number)
        service.wait_for(list(stores))
        running_load.stop()
        found = running_load.result()
    assert found["wrong"] == 0
    assert set(found["problems"]) == {"lost"}
    assert 1 <= found["problems"]["lost"] == len(found["lost_at"]) <= 4
    assert all(at >= killed for at in found["lost_at"])
    assert found["answers"] > 0


def test_nobody_at_the_address_is_said(
    plan: LoadPlan, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="the load generator ended with status 1"):
        run_load(Load(str(tmp_path / "nobody.sock"), saved(plan, tmp_path), seconds=0.1))
    assert "nobody.sock: No such file or directory" in capfd.readouterr().err


def test_the_echo_answers_with_the_same_sizes(plan: LoadPlan, tmp_path: Path) -> None:
    echo = echo_plan(plan)
    assert list(map(len, echo.frames)) == list(map(len, plan.frames))
    with echo_server() as (address, pid):
        found = run_load(Load(address, saved(echo, tmp_path), seconds=5.0, connections=3))
        assert anonymous_bytes(pid) > 0
    assert found["problems"] == {}
    assert found["builds"] == {f"{0:016x}": found["answers"]}
