"""Drift: what worker and engines tell of a release is compared with what was recorded when it was published."""

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from draftstore.engines.figures import DraftFigures, serve_metrics
from draftstore.errors import DraftstoreError
from draftstore.trees.tree import DraftTree
from schema import catalogue
from schema.catalogue import CatalogueError
from schema.cli.releases import releases
from schema.drift import DriftError, Seen, read_metrics, recorded_length, seen_in
from services.worker.figures import WorkerMetrics
from services.worker.work import Facts
from services.worker.writing import Usage
from tests.fakes.databases import publish
from tests.unit.schema.test_recordings import CHATS, Measured
from tests.unit.schema.test_releases import vary

FACTS = Facts("m", 100, 100, frozenset(), release="chat")


def worker_text(*lengths: int) -> str:
    """Return the metrics of a worker after a request of ten passes for each accepted length."""
    metrics = WorkerMetrics()
    metrics.describe(FACTS)
    for length in lengths:
        usage = Usage(prompt_tokens=1, completion_tokens=10 * length + 1, passes=10, answers=1)
        metrics.ended("chat", "stop", 0.0, 1.0, 0.5, usage)
    return metrics.text().decode()


class TestMetrics:
    def test_of_a_worker_by_release(self) -> None:
        assert seen_in(worker_text(2, 4), "chat") == Seen(6.0, 2.0)
        assert seen_in(worker_text(2, 4), "other").accepted_length is None
        assert seen_in(worker_text(), "chat").accepted_length is None

    def test_of_an_engine(self) -> None:
        figures = DraftFigures("vllm")
        port = serve_metrics(figures, 0)
        url = f"http://127.0.0.1:{port}/metrics"
        assert seen_in(read_metrics(url), "chat").accepted_length is None
        tree = DraftTree(np.array([4, 5], np.int32), np.array([-1, 0], np.int16), np.array([9, 9], np.uint8))
        for path in ([0, 1], [], [0]):
            figures.add("", tree, path, {})
        assert seen_in(read_metrics(url), "chat") == Seen(6.0, 3.0)

    def test_between_two_readings(self) -> None:
        assert Seen(30.0, 10.0).since(Seen(12.0, 4.0)) == Seen(18.0, 6.0)
        assert Seen(3.0, 1.0).since(Seen(12.0, 4.0)) == Seen(3.0, 1.0)  # it has started again

    @pytest.mark.parametrize(
        "text", ["", "# HELP x y\n# TYPE x counter\nx_total 1.0\n", "<html>no</html>", "a b c"]
    )
    def test_others_are_refused(self, text: str) -> None:
        with pytest.raises(DraftstoreError, match=r"these (metrics tell no accepted length|are no metrics)"):
            seen_in(text, "chat")

    @pytest.mark.parametrize(
        "url", ["file:///etc/passwd", "127.0.0.1:1", "http://127.0.0.1:1/metrics", "http://["]
    )
    def test_addresses_that_do_not_answer(self, url: str) -> None:
        with pytest.raises(DraftstoreError, match=r"no address of metrics|see whether it runs"):
            read_metrics(url)


class TestRecorded:
    def test_the_lowest_or_the_named_one(self, session: Session, tmp_path: Path) -> None:
        build = catalogue.add_build(session, vary(tmp_path / "live"))
        with pytest.raises(CatalogueError, match="no release 'chat'"):
            recorded_length(session, "chat")
        publish(session, "other", build.id)
        with pytest.raises(CatalogueError, match="no recording was replayed when other was published"):
            recorded_length(session, "other")
        for name in ("a", "b"):
            catalogue.add_recording(session, CHATS._replace(name=name), ["chat"])
        publish(session, "chat", build.id, measure=Measured(live=(2.0, 1.0)))
        assert recorded_length(session, "chat")[1] == 2.0
        assert recorded_length(session, "chat", "b") == ("b", 2.0)
        with pytest.raises(CatalogueError, match="the recording 'c' was not replayed"):
            recorded_length(session, "chat", "c")


class TestCommand:
    @pytest.fixture(autouse=True)
    def _published(self, engine: Engine, tmp_path: Path) -> None:
        """Have a release that was published with an accepted length of 2.0."""
        with Session(engine) as session, session.begin():
            catalogue.add_recording(session, CHATS, ["chat"])
            build = catalogue.add_build(session, vary(tmp_path / "live"))
            publish(session, "chat", build.id, measure=Measured(live=(2.0, 1.0)))

    @pytest.fixture
    def served(self) -> Iterator[tuple[str, list[str]]]:
        """Serve the texts of a list one after the other, the last one for ever; yield the address and the list."""
        texts: list[str] = []

        class Answers(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                assert self.headers["Authorization"] == "Bearer secret"
                self.send_response(200)
                self.end_headers()
                self.wfile.write((texts.pop(0) if len(texts) > 1 else texts[0]).encode())

            def log_message(self, *_: Any) -> None:
                pass

        with HTTPServer(("127.0.0.1", 0), Answers) as server:
            thread = Thread(target=server.serve_forever)
            thread.start()
            yield f"http://127.0.0.1:{server.server_port}/metrics", texts
            server.shutdown()
            thread.join()

    def _run(self, *arguments: object) -> tuple[Any, BaseException | None]:
        result = CliRunner().invoke(releases, ["drift", "chat", *map(str, arguments), "--json"])
        return json.loads(result.stdout or "null"), result.exception

    def test_a_given_length(self) -> None:
        found, error = self._run("--m", 1.61)
        assert error is None
        assert found == {
            "release": "chat", "recording": "chats", "recorded": 2.0, "least": 1.6, "drifted": False,
            "seen": [{"source": "given", "accepted_length": 1.61}],
        }  # fmt: skip
        found, error = self._run("--m", 1.59)
        assert found["drifted"]
        assert isinstance(error, DriftError)
        assert error.exit_code == 5
        assert "1.59 (given), more than 20% below the 2.00 of chats" in str(error)
        assert self._run("--m", 1.59, "--tolerance", 0.3)[1] is None

    def test_the_metrics_of_a_worker(self, served: tuple[str, list[str]]) -> None:
        url, texts = served
        options = ("--metrics", url, "--token", "secret")
        texts.append(worker_text(1, 1, 1))
        assert isinstance(self._run(*options)[1], DriftError)
        texts[:] = [worker_text()]
        found, error = self._run(*options)
        assert (found["seen"], error) == ([{"source": url, "accepted_length": None}], None)
        shown = CliRunner().invoke(releases, ["drift", "chat", *options])
        assert "nothing decoded" in shown.stdout

    def test_what_came_between_two_readings(
        self, served: tuple[str, list[str]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        waited: list[float] = []
        monkeypatch.setattr("schema.cli.drift.time", SimpleNamespace(sleep=waited.append))
        url, texts = served
        texts += [worker_text(1, 1, 1), worker_text(1, 1, 1, 3, 3)]
        found, error = self._run("--metrics", url, "--token", "secret", "--over", 600)
        assert (found["seen"][0]["accepted_length"], error, waited) == (3.0, None, [600.0])

    @pytest.mark.parametrize("options", [[], ["--m", "2", "--metrics", "http://x"]])
    def test_either_a_length_or_metrics(self, options: list[str]) -> None:
        result = CliRunner().invoke(releases, ["drift", "chat", *options])
        assert result.exit_code == 2
        assert "either --m" in result.stderr
