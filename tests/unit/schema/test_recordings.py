"""The replay gate: recordings are registered, builds replay them, and worse builds do not go live."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from sqlalchemy import Engine, select, text
from sqlalchemy.orm import Session

from draftstore.decoding.replay import ReplayResult, read_recordings, replay
from draftstore.errors import DraftstoreError
from draftstore.stores.registry import open_store
from draftstore.stores.rest.build import RestOptions, build_rest
from draftstore.text.tokenizer import TextTokenizer, load_tokenizer
from schema.catalogue.builds import CatalogueError, add_build, drop_build
from schema.catalogue.gates import Candidate, RefusedError, measure, replay_rows
from schema.catalogue.recordings import Replayed, ReplayRule, add_recording, rules_of
from schema.catalogue.releases import release_history
from schema.cli.builds import builds as builds_command
from schema.cli.recordings import recordings as recordings_command
from schema.cli.releases import releases as releases_command
from schema.models import Build, Replay
from tests.fakes.databases import publish, rollback
from tests.unit.schema.test_releases import live, vary

CHATS = ReplayRule(name="chats", path=Path("/recordings/chats.jsonl"), tolerance=0.02)
SIZED = ["corpus", "tokens", "bad-records"]
"""Checks that stores of tests fail by their size."""


def summary(length: float) -> dict[str, Any]:
    """Return the summary of a replay with an accepted length."""
    return ReplayResult().summary() | {"accepted_length": length}


class Measured:
    """A measure that says what the test says, by build: the accepted length."""

    def __init__(self, **figures: float) -> None:
        self.figures = figures
        self.asked: list[list[str]] = []

    def __call__(self, rule: ReplayRule, builds: Sequence[Candidate]) -> list[Replayed]:
        names = [Path(build.path).name for build in builds]
        self.asked.append(names)
        return [
            Replayed(rule, "backoff", summary(self.figures[name]))
            if name in self.figures
            else Replayed(rule, skipped=f"{name} is away")
            for name in names
        ]


@pytest.fixture
def pair(session: Session, tmp_path: Path) -> list[Build]:
    """Return two whole builds, `live` and `new`, with a recording for the release `chat`."""
    add_recording(session, CHATS, ["chat", "code"])
    found = [add_build(session, vary(tmp_path / name)) for name in ("live", "new")]
    publish(session, "chat", found[0].id, measure=Measured(live=2.0))
    return found


def replays_of(session: Session, build: Build) -> list[tuple[str | None, str, float]]:
    """Return what the catalogue knows of a build's replays."""
    rows = session.scalars(select(Replay).filter_by(build_id=build.id).order_by(Replay.id))
    return [(row.recording, row.recordings, row.accepted_length) for row in rows]


class TestGate:
    def test_worse_builds_are_refused_unless_forced(self, session: Session, pair: list[Build]) -> None:
        before, new = pair
        measured = Measured(live=2.0, new=1.95)
        for force in ([], ["tokens"]):
            with pytest.raises(
                RefusedError, match=r"as chat: replay: .*override replay \(force\)$"
            ) as caught:
                publish(session, "chat", new.id, measure=measured, force=force)
            reason = caught.value.refusals["replay"]
            assert reason.startswith("chats has an accepted length of 1.950, 2.5% below the 2.000")
        assert (live(session), caught.value.exit_code) == (before.id, 3)
        assert new.parameters["gates"]["chat"] == {"refused": caught.value.refusals}
        assert replays_of(session, new) == [("chats", "chats.jsonl", 1.95)] * 2
        shown = replay_rows(caught.value.new, caught.value.live)
        assert [(row["as"], row["accepted_length"]) for row in shown] == [("live", 2.0), ("new", 1.95)]
        assert shown[0]["least_length"] == pytest.approx(1.96)
        moved = publish(session, "chat", new.id, measure=measured, force=["replay"])
        assert moved.verdict.forced == caught.value.refusals
        assert (live(session), measured.asked) == (new.id, [["new", "live"]] * 3)

    def test_builds_within_tolerance_pass(self, session: Session, pair: list[Build]) -> None:
        moved = publish(session, "chat", pair[1].id, measure=Measured(live=2.0, new=1.96))
        assert moved.verdict.sentences() == []
        assert "gates" not in pair[1].parameters
        measured = Measured()  # the live build is not replayed again
        assert publish(session, "chat", pair[1].id, measure=measured).before == pair[1].id
        assert measured.asked == []

    def test_all_recordings_of_a_release_are_checked(self, session: Session, pair: list[Build]) -> None:
        add_recording(session, CHATS.changed(name="strict", tolerance=0.0), ["chat"])
        add_recording(session, CHATS.changed(name="others", tolerance=0.0), ["other"])
        measured = Measured(live=2.0, new=1.99)
        with pytest.raises(RefusedError, match=r"replay: strict has an accepted length of 1.990, 0.5% below"):
            publish(session, "chat", pair[1].id, measure=measured)
        assert len(measured.asked) == 2

    def test_the_first_build_of_a_release_is_only_measured(self, session: Session, pair: list[Build]) -> None:
        measured = Measured(new=0.1)
        moved = publish(session, "code", pair[1].id, measure=measured)
        assert measured.asked == [["new"]]
        assert replays_of(session, pair[1]) == [("chats", "chats.jsonl", 0.1)]
        assert release_history(session, "code")[0].lengths == {"chats": 0.1}
        assert [row["as"] for row in replay_rows(moved.build, moved.live)] == ["new"]

    def test_damaged_builds_are_not_replayed_and_missing_live_ones_do_not_block(
        self, session: Session, pair: list[Build]
    ) -> None:
        measured = Measured(new=1.0)
        with pytest.raises(CatalogueError, match="does not verify"):
            publish(session, "chat", pair[1].id, measure=measured, verify=lambda _: ["cut"])
        assert measured.asked == []
        moved = publish(session, "chat", pair[1].id, measure=measured)
        assert moved.verdict.skipped == {"replay": "live is away"}
        assert pair[1].parameters["gates"]["chat"] == {"skipped": moved.verdict.skipped}

    def test_accepted_lengths_outlive_builds_and_are_restored_by_a_rollback(
        self, session: Session, pair: list[Build]
    ) -> None:
        for _ in range(2):
            publish(session, "chat", pair[1].id, measure=Measured(live=2.0, new=2.5))
            rollback(session, "chat")
        drop_build(session, pair[1].id)
        moves = release_history(session, "chat")
        assert [move.lengths["chats"] for move in moves] == [2.0, 2.5, 2.0, 2.5, 2.0]
        query = "SELECT build_id, build, recording, accepted_length, action FROM release_lengths"
        seen = session.execute(text(f"{query} WHERE release = 'chat'")).all()
        assert (pair[1].id, None, "chats", 2.5, "publish") in seen
        assert (pair[0].id, pair[0].name, "chats", 2.0, "rollback") in seen
        assert len(seen) == len(moves)


def write_recordings(path: Path, texts: Path, rows: int = 8) -> Path:
    """Write the last texts of a file as outputs."""
    lines = texts.read_text(encoding="utf-8").splitlines()[-rows:]
    outputs = [json.loads(line)["text"] for line in lines]
    records = [{"prompt": "say it", "output": output, "model": "m"} for output in outputs]
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


@pytest.fixture
def recorded(small_corpus: Path, tmp_path: Path) -> ReplayRule:
    """Return outputs that the small store holds."""
    return CHATS.changed(path=write_recordings(tmp_path / "chats.jsonl", small_corpus))


@pytest.fixture(scope="module")
def unrelated(small_tokenizer: TextTokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store of numbers."""
    folder = tmp_path_factory.mktemp("unrelated")
    lines = [json.dumps({"text": " ".join(str(7 * i * k) for k in range(120))}) for i in range(60)]
    (folder / "numbers.jsonl").write_text("\n".join(lines) + "\n")
    options = RestOptions(corpus=(folder / "numbers.jsonl",), name="numbers")
    return build_rest(options, small_tokenizer, folder / "store", workers=1).path


def candidate(session: Session, store: Path) -> Candidate:
    return Candidate.of(add_build(session, store))


class TestReplays:
    """What is measured with real stores."""

    def test_both_results_equal_those_of_the_replay_command(
        self, session: Session, small_store: Path, unrelated: Path, recorded: ReplayRule
    ) -> None:
        builds = [candidate(session, store) for store in (small_store, unrelated)]
        rule = recorded.changed(rows=5, budget=7)
        tokenizer = load_tokenizer(small_store / "tokenizer")
        for store, each in zip((small_store, unrelated), measure(rule, builds), strict=True):
            recordings = read_recordings(recorded.path, tokenizer, limit=5)
            alone = replay(open_store(store).drafter(), recordings, budget=7).summary()
            assert each.summary is not None
            for figure in ("accepted_length", "tokens", "passes", "rows", "nodes_mean", "miss_rate"):
                assert each.summary[figure] == alone[figure]
        [mixed, _] = measure(rule.changed(request=True), builds)
        assert mixed.strategy.endswith(" + request")
        assert mixed.summary

    def test_a_recording_that_cannot_be_replayed_is_a_problem(
        self, session: Session, small_store: Path, recorded: ReplayRule
    ) -> None:
        build = candidate(session, small_store)
        empty = recorded.path.with_name("empty.jsonl")
        empty.write_text('{"prompt": "a", "output": ""}\n')
        for changes, problem in (
            ({"path": Path("/nowhere/none.jsonl")}, "none.jsonl"),
            ({"model": "other"}, "holds no recording of model 'other', its models are m"),
            ({"path": empty}, "no output of more than one token"),
        ):
            [found] = measure(recorded.changed(**changes), [build])
            assert str(found.problem).startswith(f"chats cannot be replayed with build {build.id}: ")
            assert problem in str(found.problem)
        add_recording(session, recorded.changed(model="other"), ["chat"])
        with pytest.raises(RefusedError, match="replay: chats cannot be replayed with build"):
            publish(session, "chat", build.id, force=SIZED)

    def test_a_live_store_that_is_missing_or_has_another_tokenizer_is_skipped(
        self,
        session: Session,
        small_store: Path,
        small_dense: Path,
        wide_store: Path,
        recorded: ReplayRule,
        tmp_path: Path,
    ) -> None:
        shutil.copytree(small_store, tmp_path / "gone")
        stores = (small_store, tmp_path / "gone", small_dense, wide_store)
        small, gone, dense, wide = (candidate(session, store) for store in stores)
        shutil.rmtree(tmp_path / "gone")
        for other, reason in (
            (gone, f"build {gone.id} cannot be replayed: "),
            (dense, f"build {dense.id}, a dresd store, drafts with its model, which is not loaded here"),
            (wide, f"builds {small.id} and {wide.id} count tokens of different tokenizers"),
        ):
            mine, theirs = measure(recorded, [small, other])
            assert mine.summary
            assert str(theirs.skipped).startswith(reason)
        assert measure(recorded, [gone, small])[0].problem
        assert all(done.skipped for done in measure(recorded, [dense, small]))


@pytest.mark.usefixtures("database")
class TestCommands:
    def _run(self, group: Any, *arguments: object) -> Any:
        result = CliRunner().invoke(group, [*map(str, arguments), "--json"], catch_exceptions=False)
        assert result.exit_code == 0, result.stderr
        return json.loads(result.stdout)

    def test_commands_add_list_and_remove_recordings(self, small_corpus: Path, tmp_path: Path) -> None:
        file = write_recordings(tmp_path / "outputs.jsonl", small_corpus)
        options = ("--release", "chat", "code", "--recorded-by", "m", "--rows", 3, "--request")
        made = self._run(recordings_command, "add", "chats", file, *options)
        assert made == {
            "name": "chats", "path": str(file), "releases": ["chat", "code"], "model": "m", "request": True,
            "rows": 3, "budget": 64, "tolerance": 0.02, "outputs": 3,
        }  # fmt: skip
        [listed] = self._run(recordings_command, "list", "--release", "code")
        assert listed | {"outputs": 3} == made
        assert self._run(recordings_command, "list", "--release", "other") == []
        for name, model, problem in (
            ("chats", "m", "the recording 'chats' already"),
            ("x", "n", "models are m"),
        ):
            with pytest.raises(DraftstoreError, match=problem):
                self._run(recordings_command, "add", name, file, "--release", "chat", "--recorded-by", model)
        assert self._run(recordings_command, "remove", "chats") == {"recording": "chats", "removed": True}
        with pytest.raises(DraftstoreError, match="no recording 'chats'"):
            self._run(recordings_command, "remove", "chats")

    def test_a_build_of_unrelated_text_is_refused_and_both_results_are_shown(
        self, engine: Engine, small_store: Path, unrelated: Path, recorded: ReplayRule
    ) -> None:
        with Session(engine) as session, session.begin():
            add_recording(session, recorded, ["chat"])
            assert rules_of(session, "chat") == (recorded,)
        force = ("--force", ",".join(SIZED))
        first = self._run(releases_command, "publish", "chat", small_store, *force)
        [row] = first["replays"]
        assert (row["recording"], row["as"], row["build"]) == ("chats", "new", first["build"])
        runner = CliRunner()
        refused = runner.invoke(releases_command, ["publish", "chat", str(unrelated), *force])
        assert isinstance(refused.exception, RefusedError)
        table = [line.split("│")[2].strip() for line in refused.stderr.splitlines() if "│" in line]
        assert table == ["live", "new"]
        shown = self._run(builds_command, "show", unrelated)
        assert shown["gates"]["chat"]["refused"].keys() == {"replay"}
        [replayed] = shown["replays"]
        assert row["accepted_length"] > 2 > 1.2 > replayed["accepted_length"]
        assert "chats: accepted length 1." in runner.invoke(builds_command, ["show", str(unrelated)]).stdout
        [move] = self._run(releases_command, "history", "chat")
        assert move["accepted_lengths"] == {"chats": row["accepted_length"]}
