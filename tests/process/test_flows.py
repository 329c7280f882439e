"""The flows: what they build, register, publish and report, and what they leave behind when killed."""

import errno
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import click
import psycopg
import pytest
from click.testing import CliRunner
from prefect import State, Task
from prefect.client.orchestration import get_client
from prefect.logging import disable_run_logger
from prefect.utilities.callables import get_call_parameters

from draftstore.errors import BuildError, BuildRunningError, CorpusError, TokenizerError
from draftstore.live.log import LiveDocument
from draftstore.live.shared import Vocabulary
from draftstore.live.store import LiveStore
from draftstore.options import OptionsError
from draftstore.storage.manifest import load_manifest, verify_files
from draftstore.stores.crest import build as crest_module
from draftstore.stores.crest.build import build_crest
from draftstore.stores.kind import Workers
from draftstore.stores.registry import open_store
from draftstore.stores.rest import build as rest_module
from draftstore.stores.rest.build import RestOptions, build_rest
from draftstore.text.python_source import Source
from draftstore.text.tokenizer import load_tokenizer
from draftstore.text.tokenizing import build_tokens
from draftstore.text.tokens import open_shards
from pipelines import steps
from pipelines.parameters import BuildInput, CorpusFiles, Publishing, flow_of
from pipelines.rebuild import CrestRebuild, DenseRebuild
from schema.catalogue.builds import CatalogueError
from schema.catalogue.publishing import rollback
from schema.cli.corpora import corpus
from schema.cli.releases import releases
from schema.collections.collecting import NewSource, add_sources
from schema.db.database import connect, migrate
from schema.db.embedded import HOME_VARIABLE
from schema.db.errors import DatabaseAwayError, DatabaseError, DatabaseTimeoutError
from schema.renewal import ledger as ledgers
from schema.renewal import making
from schema.renewal.ledger import Ledger
from tests.conftest import small_tokenizer_folder, wordy_tokenizer_folder, write_texts
from tests.fakes.servers import PostgresServer
from tests.fakes.waiting import until
from tests.unit.hf.test_loading import model_folder

__all__ = ["model_folder"]  # a fixture

NGRAMS = 300


def run(group: click.Group, *arguments: str) -> int:
    """Run a command and return its exit status."""
    result = CliRunner().invoke(group, arguments)
    return getattr(result.exception, "exit_code", result.exit_code)


class Site:
    """A data folder with a tokenizer, and what one asks the flows for there."""

    def __init__(self, folder: Path) -> None:
        self.home = folder / "home"
        self.corpus = folder / "texts.jsonl"
        self.tokenizer = small_tokenizer_folder(folder / "tokenizer")
        self.write(seed=0)

    def write(self, seed: int, documents: int = 60) -> None:
        """Have another corpus in the same file."""
        write_texts(self.corpus, documents, seed)

    @property
    def request(self) -> dict[str, Any]:
        """Parameters of every flow."""
        return {"name": "small", "corpus": CorpusFiles(paths=[self.corpus]), "tokenizer": str(self.tokenizer)}

    @property
    def crest(self) -> dict[str, Any]:
        """Parameters of build-crest."""
        shorter = ["corpus", "tokens"]  # what is written with another seed may be a fifth shorter
        return {**self.request, "ngrams": NGRAMS, "max_n": 3, "release": "live", "force": shorter}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, database: str) -> Site:
    """Return a data folder, and use it together with a database of the test's own."""
    found = Site(tmp_path)
    monkeypatch.setenv(HOME_VARIABLE, str(found.home))
    return found


@pytest.fixture(scope="session")
def orchestrator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Run a Prefect server that the flows of this process report to; return the URL of its API."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PREFECT_HOME", str(tmp_path_factory.mktemp("prefect")))
        from prefect.settings import PREFECT_API_URL
        from prefect.testing.utilities import prefect_test_harness

        with prefect_test_harness(server_startup_timeout=120):
            yield str(PREFECT_API_URL.value())


def plain(flow: Any) -> Callable[..., Any]:
    """Return a flow as a function that checks its parameters and raises what Prefect would call a failure."""

    def run(**given: Any) -> Any:
        made = flow.fn(**flow.validate_parameters(get_call_parameters(flow.fn, (), given)))
        if isinstance(made, State):
            error: Any = made.data
            raise error
        return made

    return run


@pytest.fixture
def flows(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return the flows without Prefect: functions, whose steps are tried once."""
    from pipelines.flows import FLOWS
    from pipelines.rebuild import rebuild

    for name, each in list(vars(steps).items()):
        if isinstance(each, Task):
            monkeypatch.setattr(steps, name, each.fn)
    with disable_run_logger():
        yield SimpleNamespace(**{each.name.replace("-", "_"): plain(each) for each in (rebuild, *FLOWS)})


@pytest.fixture
def prefect(orchestrator: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the flows, whose tasks wait but a moment between attempts."""
    from pipelines import flows

    for task in (steps.make_tokens, steps.make_store, steps.publish):
        monkeypatch.setattr(task, "retry_delay_seconds", [0.2, 1.0, 2.0, 2.0])
    return flows


def rows(query: str, *parameters: Any) -> list[tuple[Any, ...]]:
    """Ask the catalogue."""
    with connect() as connection:
        return connection.execute(query.encode(), parameters).fetchall()


def states() -> list[tuple[Any, ...]]:
    """Return kind and state of all builds, oldest first."""
    return rows("SELECT kind, state FROM builds ORDER BY id")


def live(release: str = "live") -> Path | None:
    """Return the store that a release points at."""
    query = "SELECT path FROM releases JOIN builds ON builds.id = build_id WHERE releases.name = %s"
    found = rows(query, release)
    return Path(found[0][0]) if found else None


def require_whole(store: Path | None) -> None:
    """Check every byte of a store, and draft from it."""
    assert store is not None
    assert verify_files(store, load_manifest(store)) == []
    opened = open_store(store)
    opened.drafter().session([40, 41, 42]).propose(8)
    opened.close()


class TestBuildRest:
    def test_another_corpus_gets_another_directory_and_old_builds_are_removed_last(
        self, flows: Any, site: Site
    ) -> None:
        tokens = flows.tokenize_corpus(**site.request)
        shards = open_shards(Path(tokens["path"]))
        assert (shards.document_count, tokens["kind"], tokens["reused"]) == (60, "tokens", False)
        first = flows.build_rest(**site.request, release="live")
        assert states() == [("tokens", "finished"), ("rest", "finished")]
        assert rows("SELECT count(DISTINCT corpus_id) FROM builds") == [(1,)]
        assert first["path"].startswith(str(site.home / "stores" / "small"))
        before = load_manifest(Path(first["path"]), "rest")
        site.write(seed=1)
        second = flows.build_rest(**site.request, release="live")
        assert second["path"] != first["path"]
        assert verify_files(Path(first["path"]), before) == []
        assert live() == Path(second["path"])
        moves = rows("SELECT from_build, to_build FROM release_moves ORDER BY id")
        assert moves == [(None, first["build"]), (first["build"], second["build"])]
        site.write(seed=2)
        third = flows.build_rest(**site.request, release="live", keep=1)
        exist = [Path(each["path"]).exists() for each in (first, second, third)]
        assert exist == [False, True, True]  # one to roll back to, one live
        assert states() == [("rest", "finished"), ("tokens", "finished"), ("rest", "finished")]

    def test_bad_input_fails_at_once_with_a_reason(
        self, prefect: Any, site: Site, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tokenizing = Mock(wraps=build_tokens)
        monkeypatch.setattr(making, "build_tokens", tokenizing)
        site.corpus.write_text('{"text": "fine"}\n{"text": 7}\n', encoding="utf-8")
        strict = site.request["corpus"].model_copy(update={"strict": True})
        with pytest.raises(CorpusError, match="line 2"):
            prefect.build_rest(**{**site.request, "corpus": strict})
        tokenizing.assert_called_once()  # nobody tries again
        ((state, error, finished),) = rows("SELECT state, error, finished_at FROM builds")
        assert (state, "line 2" in error, finished is not None) == ("failed", True, True)

    def test_reads_that_fail_once_are_retried(
        self, prefect: Any, site: Site, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        attempts: list[int] = []

        def flaky(*arguments: Any, **options: Any) -> Any:
            attempts.append(1)
            if len(attempts) == 1:
                raise OSError(errno.EIO, "Input/output error")
            return build_rest(*arguments, **options)

        monkeypatch.setattr(rest_module, "BUILDER", rest_module.BUILDER._replace(build=flaky))
        prefect.build_rest(**site.request)
        assert len(attempts) == 2
        assert states() == [("tokens", "finished"), ("rest", "finished")]
        with get_client(sync_client=True) as client:
            assert "build-rest small" in {run.name for run in client.read_flow_runs()}


@pytest.mark.parametrize(
    ("option", "named"), [("force", "force"), ("column", "corpus.column"), ("where", "corpus.where")]
)
def test_a_failed_run_names_the_parameter(option: str, named: str) -> None:
    @flow_of("any", BuildInput, Publishing)
    def refused(**_: Any) -> None:
        """Fail."""
        raise CorpusError("no", option)

    assert refused.fn().message == f"no (the parameter {named})"


class TestBuildCrest:
    def test_builds_registers_and_publishes_once(self, flows: Any, site: Site) -> None:
        made = flows.build_crest(**site.crest)
        require_whole(live())
        assert live() == Path(made["path"])
        assert states() == [(kind, "finished") for kind in ("tokens", "rest", "ngrams", "crest")]
        assert rows("SELECT count(*) FROM kept_ngrams") == [(made["entries"],)]
        ((timings, backends),) = rows("SELECT timings, backends FROM builds WHERE id = %s", made["build"])
        assert "packing" in timings
        assert backends == ["lmdb"]
        again = flows.build_crest(**site.crest)
        assert (again["build"], again["reused"], len(states())) == (made["build"], True, 4)
        assert rows("SELECT count(*) FROM release_moves") == [(1,)]
        counts = flows.count_ngrams(**site.request, max_n=2, head=50)
        manifest = load_manifest(Path(counts["path"]), "ngrams")
        spectrum = (
            "SELECT n, sum(ngrams)::bigint FROM ngram_spectrum WHERE build_id = %s GROUP BY n ORDER BY n"
        )
        assert rows(spectrum, counts["build"]) == [(n, manifest.counts[f"n{n}"]) for n in (1, 2)]
        head = "SELECT n, count(*) FROM ngrams WHERE build_id = %s GROUP BY n ORDER BY n"
        assert rows(head, counts["build"]) == [(1, 50), (2, 50)]

    def test_of_several_stores_first_joins_them(self, flows: Any, site: Site) -> None:
        first = flows.build_rest(**site.request)
        site.write(seed=1)
        second = flows.build_rest(**site.request)
        given = {"rest": [first["path"], second["path"]], "name": "both", "max_n": 2, "ngrams": NGRAMS}
        made = flows.build_crest(**given)
        assert states()[4:] == [(kind, "finished") for kind in ("rest", "ngrams", "crest")]
        assert made["tokens"] == first["tokens"] + second["tokens"]
        ((source,),) = rows("SELECT source_id FROM builds WHERE id = %s", made["build"])
        assert rows("SELECT kind, name FROM builds WHERE id = %s", source) == [("rest", "both")]
        again = flows.build_crest(**given)
        assert (again["build"], again["reused"], len(states())) == (made["build"], True, 7)

    def test_resumes_after_its_store_was_published_but_not_registered(self, flows: Any, site: Site) -> None:
        made = flows.build_crest(**site.crest, backend="postgres")
        assert rows("SELECT count(*) FROM trees") == [(made["entries"],)]
        with connect() as connection:  # what a kill between the two leaves
            connection.execute("DELETE FROM release_moves")
            connection.execute("DELETE FROM releases")
            connection.execute(f"DROP TABLE trees_{made['build']:d}".encode())
            connection.execute("DELETE FROM builds WHERE kind = 'crest'")
        again = flows.build_crest(**site.crest, backend="postgres")
        assert again["path"] == made["path"]
        require_whole(live())

    def test_impossible_builds_are_refused_before_any_work(
        self, flows: Any, site: Site, small_store: Path
    ) -> None:
        for given in ({"corpus": CorpusFiles(paths=[site.corpus])}, {"rest": [small_store]}):
            with pytest.raises(BuildError, match="needs a name: --param name=chat"):
                flows.build_crest(**given, release="{name}")
        with pytest.raises(OptionsError, match="choose one"):
            flows.build_crest(**site.crest, max_bytes=100_000)
        assert states() == []

    def test_the_demonstration_may_not_use_the_release_of_other_texts(
        self, flows: Any, site: Site, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sources = [Source("a.py", site.corpus.read_text())]
        monkeypatch.setattr("schema.renewal.making._library_sources", lambda: sources)
        tokenizer = str(site.tokenizer)
        for _ in range(2):
            demo = flows.build_rest(tokenizer=tokenizer, release="{name}")
            assert (demo["name"], demo["release"]) == ("demo", "demo")
        own = flows.build_rest(**site.request, release="{name}")
        builds = states()
        assert (own["release"], live("small")) == ("small", Path(own["path"]))
        with pytest.raises(CatalogueError, match=rf"small belongs to build {own['build']} .* demonstration"):
            flows.build_rest(tokenizer=tokenizer, name="small", release="small")
        with pytest.raises(CatalogueError, match="small points at a rest store"):
            flows.build_crest(**{**site.crest, "release": "small"})
        assert states() == builds  # refused before any work
        with pytest.raises(CatalogueError, match="small belongs to build"):
            flows.build_crest(
                rest=[demo["path"]], ngrams=NGRAMS, name="small", release="small", force=["kind"]
            )
        assert live("small") == Path(own["path"])
        with connect() as connection:
            connection.execute("INSERT INTO collections (name) VALUES ('chat')")
        with pytest.raises(CatalogueError, match="chat-crest belongs to the collection chat"):
            flows.build_rest(tokenizer=tokenizer, release="chat-crest")


class TestRebuild:
    @pytest.fixture
    def rebuild(self, flows: Any, site: Site) -> Callable[..., Any]:
        """Return the flow, for a collection of the site's corpus."""
        with Ledger() as ledger, ledger.session() as session:
            add_sources(session, "small", [NewSource(place=str(site.corpus))], str(site.tokenizer))
        return lambda **given: flows.rebuild(
            **{"distilling": CrestRebuild(ngrams=NGRAMS, max_n=2), "workers": 1, **given}
        )

    def test_builds_publishes_and_then_has_nothing_to_do(
        self, rebuild: Callable[..., Any], site: Site, model_folder: Path
    ) -> None:
        dense = DenseRebuild(model=str(model_folder), dims=8)
        (first,) = rebuild(dense=dense)
        kinds = {"small": "rest", "small-crest": "crest", "small-dense": "dense"}
        released = dict(rows("SELECT name, build_id FROM releases"))
        assert released == {name: first[kind]["build"] for name, kind in kinds.items()}
        for name in kinds:
            store = live(name)
            assert store is not None
            assert verify_files(store, load_manifest(store)) == []
        (again,) = rebuild(dense=dense)
        assert (again["added"], again["removed"], again["unchanged"]) == (0, 0, True)
        assert (again["crest"], again["dense"]) == (None, None)
        assert dict(rows("SELECT name, build_id FROM releases")) == released
        with site.corpus.open("a") as file:
            file.write('{"text": "the house by the river"}\n')
        (grown,) = rebuild(collections=["small"], dense=dense, keep=1)
        assert (grown["added"], grown["removed"], grown["crest"], grown["dense"]) == (1, 0, None, None)
        assert live("small") == Path(grown["rest"]["path"])
        require_whole(live("small"))
        site.corpus.write_text("".join(site.corpus.read_text().splitlines(keepends=True)[1:]))
        (less,) = rebuild(dense=dense.changed(dims=4))
        assert (less["removed"], less["crest"]["reused"], less["dense"]["reused"]) == (1, False, False)
        assert load_manifest(Path(less["dense"]["path"])).parameters["dims"] == 4
        assert live("small-dense") == Path(less["dense"]["path"])

    def test_a_model_with_another_tokenizer_is_refused_before_any_work(
        self, rebuild: Callable[..., Any], tmp_path: Path, model_folder: Path
    ) -> None:
        (tmp_path / "wordy").mkdir()
        with Ledger() as ledger, ledger.session() as session:
            add_sources(session, "small", [], str(wordy_tokenizer_folder(tmp_path / "wordy")))
        with pytest.raises(TokenizerError, match="not that of the model"):
            rebuild(dense=DenseRebuild(model=str(model_folder)))
        assert states() == []

    def test_a_rolled_back_release_is_not_moved_forward(
        self, rebuild: Callable[..., Any], site: Site
    ) -> None:
        (first,) = rebuild(distilling=None)
        with site.corpus.open("a") as file:
            file.write('{"text": "the house by the river"}\n')
        rebuild(distilling=None)
        with Ledger() as ledger:
            rollback(ledger.session, "small")
        rebuild(distilling=None)
        assert rows("SELECT build_id FROM releases") == [(first["rest"]["build"],)]

    def test_removed_documents_that_come_back_leave_with_the_next_run(
        self, rebuild: Callable[..., Any], site: Site
    ) -> None:
        (first,) = rebuild()
        assert run(corpus, "remove", "small", "--document", f"{site.corpus.name}#7", "--yes") == 0
        (second,) = rebuild()
        for kind, release in (("rest", "small"), ("crest", "small-crest")):
            old, new = str(first[kind]["build"]), second[kind]["build"]
            for move in (("rollback", release), ("publish", release, old)):
                assert run(corpus, "prove-removed", "small") == 0
                assert run(releases, *move) == 3
                assert run(releases, *move, "--force", "removed") == 0
                assert run(corpus, "prove-removed", "small") == 5
                rebuild()  # nothing is new
                assert rows("SELECT build_id FROM releases WHERE name = %s", release) == [(new,)]

    def test_a_run_that_leaves_removed_documents_live_fails(
        self, rebuild: Callable[..., Any], flows: Any, site: Site
    ) -> None:
        rebuild()
        flows.build_rest(**site.request, release="live")
        assert run(corpus, "remove", "small", "--document", f"{site.corpus.name}#7", "--yes") == 0
        with pytest.raises(CatalogueError, match=r"small-crest stays at build \d+: 1 document removed from"):
            rebuild(distilling=None)
        with pytest.raises(CatalogueError, match=r"live stays at build \d+: 1 document removed from"):
            flows.build_rest(**site.request, release="live")
        rebuild(distilling=None, force=["removed"])

    def test_published_documents_leave_live_memory_and_expired_ones_the_log(
        self, rebuild: Callable[..., Any], site: Site, tmp_path: Path
    ) -> None:
        folder, tokenizer = tmp_path / "live", load_tokenizer(site.tokenizer)
        source = NewSource(place=str(folder), live=True)
        with Ledger() as ledger, ledger.session() as session:
            add_sources(session, "small", [source])
        ended, running = (LiveStore(10_000, folder) for _ in range(2))
        for store, text in ((ended, "answered before"), (running, "answered just now")):
            store.agree(Vocabulary(tokenizer.vocab_size, tokenizer.fingerprint))
            store.append([LiveDocument(tokenizer.encode(text, bos=False))])
        until(lambda: len(running) == len(ended))
        ended.close()
        left = len(tokenizer.encode("answered just now", bos=False)) + 1
        (first,) = rebuild(distilling=None)
        assert (first["added"], first["live"]) == (62, {"rest": 1, "deleted": 0})
        until(lambda: len(running) == left)
        with Ledger() as ledger, ledger.session() as session:
            add_sources(session, "small", [source.changed(retention=timedelta(microseconds=1))])
        running.close()
        (second,) = rebuild(distilling=None)
        assert (second["removed"], second["live"]) == (2, {"rest": 1, "deleted": 2})

    def test_a_failing_collection_does_not_stop_the_others(
        self, rebuild: Callable[..., Any], site: Site
    ) -> None:
        gone = site.corpus.with_name("gone.jsonl")
        gone.write_text('{"text": "the house by the river"}\n')
        with Ledger() as ledger, ledger.session() as session:
            add_sources(session, "earlier", [NewSource(place=str(gone))], str(site.tokenizer))
        gone.unlink()
        with pytest.raises(CorpusError, match=r"gone\.jsonl"):
            rebuild(distilling=None)
        assert rows("SELECT name FROM releases") == [("small",)]


def test_answers_of_a_model_are_a_corpus_that_other_flows_build_from(
    flows: Any, site: Site, model_folder: Path
) -> None:
    prompts = write_texts(site.corpus.with_name("prompts.jsonl"), 12, seed=3)
    questions = {"prompts": [prompts], "max_tokens": 12, "limit": 10}
    asked = {"model": str(model_folder), "questions": questions, "name": "own"}
    made = flows.generate_responses(**asked)
    path = made["path"]
    assert path == str(site.home / "corpora" / "own" / "answers.jsonl.zst")
    assert (made["reused"], made["answers"] > 5) == (False, True)
    assert flows.generate_responses(**asked) == {**made, "reused": True}
    built = flows.build_rest(
        name="own", corpus=CorpusFiles(paths=[Path(path)]), tokenizer=str(site.tokenizer)
    )
    assert load_manifest(Path(built["path"])).counts["documents"] == made["answers"]
    for reused in (False, True):
        dense = flows.build_dresd(**asked, dims=8, release="live")
        assert (live(), dense["reused"]) == (Path(dense["path"]), reused)
    manifest = load_manifest(Path(dense["path"]), "dresd")
    assert verify_files(Path(dense["path"]), manifest) == []
    assert (manifest.corpus["sources"], manifest.target_model) == ([path], "small-model")
    other = flows.generate_responses(**{**asked, "questions": {**questions, "limit": 4}})
    assert (other["path"], other["reused"], other["answers"] <= 4) == (path, False, True)


@pytest.mark.parametrize(
    ("error", "transient"),
    [
        (OSError(errno.EIO, "Input/output error"), True),
        (ConnectionResetError(errno.ECONNRESET, "reset"), True),
        (DatabaseTimeoutError("slow"), True),
        (psycopg.OperationalError("connection to server failed"), True),
        (OSError(errno.ENOSPC, "No space left on device"), False),
        (PermissionError(errno.EACCES, "Permission denied"), False),
        (DatabaseError("wrong password"), False),
        (CorpusError("no text"), False),
    ],
)
def test_transient_errors_are_retried(error: Exception, transient: bool) -> None:
    caused, during, cut_off = (BuildError("the build failed") for _ in range(3))
    caused.__cause__, during.__context__, cut_off.__context__ = error, error, error
    cut_off.__suppress_context__ = True
    assert steps.is_transient(error) == steps.is_transient(caused) == steps.is_transient(during) == transient
    assert not steps.is_transient(cut_off)


class TestLedger:
    def test_two_runs_at_one_place_do_not_mix(self, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
        def second_run(*arguments: Any, **options: Any) -> Any:
            monkeypatch.setattr(rest_module, "BUILDER", rest_module.BUILDER._replace(build=build_rest))
            result = build_rest(*arguments, **options)
            with Ledger() as other:
                build(other)
            return result

        def build(ledger: Ledger) -> None:
            tokens = steps.make_tokens.fn(ledger, "small", site.request["corpus"], str(site.tokenizer))
            options = RestOptions(name="small", corpus=(), segment_tokens=1 << 20)
            making.make_store(ledger, "rest", options, Workers(workers=1), tokens)

        monkeypatch.setattr(rest_module, "BUILDER", rest_module.BUILDER._replace(build=second_run))
        with Ledger() as ledger:
            build(ledger)
        ((failed, error), (finished, _)) = rows(
            "SELECT state, error FROM builds WHERE kind = 'rest' ORDER BY id"
        )
        assert (failed, finished) == ("failed", "finished")
        assert "another run registered" in error

    def test_the_result_of_another_run_is_found(self, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
        def make() -> bool:
            with Ledger() as ledger:
                tokens = steps.make_tokens.fn(ledger, "small", site.request["corpus"], str(site.tokenizer))
            return tokens.built.reused

        def taken(*_: Any, **__: Any) -> None:
            monkeypatch.setattr(making, "build_tokens", build_tokens)
            raise BuildRunningError("another build is running")

        monkeypatch.setattr(making, "build_tokens", taken)
        monkeypatch.setattr(ledgers, "sleep", lambda _: made.append(make()))
        made: list[bool] = []
        assert make()
        assert made == [False]
        assert rows("SELECT count(*) FROM builds WHERE state = 'finished'") == [(1,)]


def test_unreachable_databases_are_retried_and_then_fail(
    prefect: Any, site: Site, own_server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for task in (steps.make_store, steps.publish):  # a busy machine takes its time to recover a database
        monkeypatch.setattr(task, "retry_delay_seconds", [1.0, 3.0, 15.0, 45.0])
    migrate()
    request = {**site.crest, "backend": "both"}
    prefect.build_crest(**request)

    def stop_during_the_next_build(then: Callable[[], None]) -> None:
        def build(*arguments: Any, **options: Any) -> Any:
            monkeypatch.setattr(crest_module, "BUILDER", crest_module.BUILDER._replace(build=build_crest))
            own_server.stop()
            then()
            return build_crest(*arguments, **options)

        monkeypatch.setattr(crest_module, "BUILDER", crest_module.BUILDER._replace(build=build))

    before = live()
    site.write(seed=1)
    restart = threading.Timer(0.5, own_server.start)
    stop_during_the_next_build(restart.start)
    prefect.build_crest(**request)
    restart.join()
    assert live() != before
    require_whole(live())
    assert rows("SELECT count(*) FROM builds WHERE state = 'running'") == [(0,)]

    before = live()
    site.write(seed=2)
    stop_during_the_next_build(lambda: None)
    monkeypatch.setattr(steps.make_store, "retry_delay_seconds", [0.1])
    with pytest.raises(DatabaseAwayError, match="does not answer"):
        prefect.build_crest(**request)
    own_server.start()
    assert live() == before
    require_whole(before)
    made = prefect.build_crest(**request)
    assert live() == Path(made["path"]) != before
    assert ("crest", "running") not in states()
