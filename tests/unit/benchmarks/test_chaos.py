"""The soak does to a system what it says, and counts what came of it."""

import subprocess
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import psycopg
import pytest

pytest.importorskip("psutil")
pytest.importorskip("matplotlib")

from benchmarks.chaos_clients import Away, Client
from benchmarks.chaos_faults import DATABASE, DISK, KINDS, Event, Faults, Planned, kept_down, plan_faults
from benchmarks.chaos_judge import TAKES_DOWN, cause, cause_of, gaps
from benchmarks.chaos_orphans import orphans_of_builds
from schema.embedded import acquire
from schema.postgres.placement import find_place
from tests.fakes.servers import reachable_folder
from tests.fakes.waiting import SECONDS


def test_an_hour_kills_each_kind_as_often_at_even_distances() -> None:
    planned = plan_faults(3600, 20, KINDS, 2)
    counts = Counter(each.what for each in planned)
    assert counts == dict.fromkeys(KINDS, 20) | {DATABASE: 3, DISK: 2, "lookup worker": 23}
    assert [each.due for each in planned] == sorted(each.due for each in planned)
    assert 0 < planned[0].due < planned[-1].due < 3600
    servers = [each.due for each in planned if each.what == "prefect server"]
    assert min(np.diff(servers)) > 150  # five within ten minutes would end `make prefect`


def test_what_does_not_run_is_killed_later_and_without_a_disk_none_is_filled() -> None:
    process = subprocess.Popen(["sleep", "100"])
    roles: dict[int, str] = {}
    faults = Faults([Planned(1.0, "flow"), Planned(1.0, DISK)], lambda: roles, 1.0, None)
    faults.act(2.0)
    assert faults.left == ["flow"]
    roles[process.pid] = "flow"
    faults.act(0.5)
    assert process.poll() is None
    faults.act(2.0)
    assert process.wait(SECONDS) == -9
    assert [event.what for event in faults.events] == ["flow"]
    assert faults.left == []


@pytest.mark.parametrize("way", ["stop", "kill"])
def test_the_database_stays_down_while_it_should(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with reachable_folder() as home, acquire(home) as lease:
        monkeypatch.setenv("DRAFTSTORE_HOME", str(home))
        monkeypatch.delenv("DRAFTSTORE_DATABASE_URL", raising=False)
        url = lease.url
        with kept_down(find_place(home).base, way) as down:
            assert down
            with pytest.raises(psycopg.OperationalError):
                psycopg.connect(url)
        psycopg.connect(lease.ensure()).close()


def test_a_client_notes_what_is_wrong_and_when_nobody_answered() -> None:
    told = iter(["", "wrong: text", "503", "ConnectionRefusedError", "", ""])
    done = threading.Event()

    def question() -> str:
        said = next(told, None)
        if said is None:
            done.set()
        return said or ""

    client = Client("any", [question], 0.0)
    client.start()
    assert done.wait(SECONDS)
    client.stop()
    assert client.wrong == ["wrong: text"]
    assert [away.what for away in client.away] == ["503"]
    assert client.away[0].begin <= client.away[0].end
    assert client.answers >= 3


def test_gaps_are_put_down_to_the_kills_that_can_bring_them_about() -> None:
    found = gaps(np.array([0.0, 0.1, 0.2, 3.0, 3.1]))
    assert [(away.begin, away.end) for away in found] == [(0.2, 3.0)]
    worker, supervisor = Event("lookup worker", 0.2, 0.2), Event("lookup supervisor", 0.3, 0.3)
    assert cause_of("drafts in frames", found[0], [worker]) == ""
    assert cause_of("drafts in frames", found[0], [worker, supervisor]) == "lookup supervisor"
    assert cause_of("completions", Away(9.0, 10.0, "500"), [Event("decoding worker", 1.0, 1.0)]) == ""
    both = [worker, Event("lookup web", 0.2, 0.2)]
    assert cause_of("drafts in JSON", Away(0.2, 1.0, "503"), both[:1]) == "lookup worker"
    assert (
        cause_of("drafts in JSON", Away(0.2, 9.0, "503"), both[:1]) == ""
    )  # the other one should have answered
    assert cause_of("drafts in JSON", Away(0.2, 9.0, "503"), both) == "lookup web"
    assert cause(5.0, 6.0, [DATABASE], [Event(DATABASE, 1.0, 5.5)]) == DATABASE
    assert set(TAKES_DOWN) == {"drafts in frames", "drafts in JSON", "completions"}


def test_what_is_left_over_is_found(database: str, tmp_path: Path) -> None:
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute("CREATE TABLE trees_77 (id int)")
    left = tmp_path / "stores" / "chat" / ".crest-0123456789abcdef.partial"
    left.mkdir(parents=True)
    (left.parent / ".crest-0123456789abcdef.lock").touch()
    found = orphans_of_builds(tmp_path)
    assert found["folders"] == ["chat/.crest-0123456789abcdef.partial"]
    assert found["tables"] == ["trees_77"]
    assert found["running builds"] == []
