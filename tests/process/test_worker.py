"""The process of the decoding worker: how it starts and ends. Its model does not use torch."""

import http.client
import json
import signal
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from draftstore.errors import DraftstoreError
from draftstore.text.tokenizer import TextTokenizer
from services.cli.worker import worker
from services.common import logs
from services.common.permissions import PREFIX, hash_token
from tests.fakes.served import Service
from tests.fakes.waiting import SECONDS, until
from tests.fakes.workers import MODEL, launch_worker, read_stream, served_worker, text_of

FAKE = "tests.fakes.workers"


@pytest.fixture
def tokenizer(small_tokenizer: TextTokenizer, tmp_path: Path) -> Path:
    """Return a folder that a process can load the tokenizer from."""
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    small_tokenizer.save(folder)
    return folder


def begin(service: Service, **asked: Any) -> http.client.HTTPConnection:
    return service.begin("POST", "/v1/completions", asked)


def events(service: Service) -> list[dict[str, Any]]:
    return [json.loads(line) for line in service.log.splitlines()]


def test_the_answer_in_hand_is_finished_before_the_worker_ends(tokenizer: Path, tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    hold.touch()
    with served_worker("--tokenizer", tokenizer, "--hold", hold, folder=tmp_path, module=FAKE) as service:
        assert service.started["model"] == MODEL
        assert service.get("/readyz") == {"status": "ready"}
        connection = begin(service, prompt="zero", max_tokens=120, stream=True)
        answer = connection.getresponse()
        service.signal(signal.SIGTERM)
        until(lambda: "stopping" in service.log)
        status, body = service.request("POST", "/v1/completions", {"prompt": "late"})
        assert (status, json.loads(body)["error"]["code"]) == (503, "stopping")
        assert service.request("GET", "/readyz")[0] == 503
        hold.unlink()
        pieces = read_stream(answer)
        connection.close()
        assert text_of(pieces).startswith(" 0 1 2 3")
        assert pieces[-1]["choices"][0]["finish_reason"] == "length"
        assert service.process.wait(SECONDS) == 0
        told = events(service)
    assert [event["event"] for event in told] == [
        "loading the model", "ready", "stopping", "answer ended", "stopped",
    ]  # fmt: skip
    assert (told[3]["completion_tokens"], told[3]["reason"]) == (120, "length")
    assert "zero" not in service.log  # no text of requests is logged


@pytest.mark.parametrize("twice", [False, True])
def test_an_answer_that_takes_too_long_is_broken_off(tokenizer: Path, tmp_path: Path, twice: bool) -> None:
    grace = 60 if twice else 0.1
    options = ("--tokenizer", tokenizer, "--pass-seconds", 0.05, "--grace-seconds", grace)
    with served_worker(*options, folder=tmp_path, module=FAKE) as service:
        connection = begin(service, prompt="zero", max_tokens=1000, stream=True)
        answer = connection.getresponse()
        service.signal(signal.SIGTERM)
        if twice:
            until(lambda: "stopping" in service.log)
            service.signal(signal.SIGTERM)
        assert read_stream(answer)[-1]["error"]["code"] == "stopping"
        connection.close()
        assert service.process.wait(SECONDS) == 0


def test_a_pass_that_does_not_end_does_not_keep_the_process(tokenizer: Path, tmp_path: Path) -> None:
    options = ("--tokenizer", tokenizer, "--pass-seconds", 600, "--grace-seconds", 0.1, "--cut-seconds", 0.1)
    with served_worker(*options, folder=tmp_path, module=FAKE) as service:
        connection = begin(service, prompt="zero", stream=True)
        connection.getresponse()
        assert service.stop() == 0
        connection.close()


def test_the_worker_can_be_stopped_while_it_loads(tokenizer: Path, tmp_path: Path) -> None:
    process = launch_worker("--tokenizer", tokenizer, "--load-seconds", 600, folder=tmp_path, module=FAKE)
    service = Service(process, tmp_path)
    try:
        until(lambda: "loading the model" in service.log)
        assert service.stop() == 0
    finally:
        process.kill()
        process.communicate(timeout=SECONDS)


def test_a_model_that_cannot_be_loaded(tokenizer: Path, tmp_path: Path) -> None:
    process = launch_worker("--tokenizer", tokenizer, "--fail", folder=tmp_path, module=FAKE)
    out, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 1
    assert out == ""
    assert (tmp_path / "log").read_text().splitlines()[-1] == "error: there is no model"


def test_the_file_of_tokens_is_read_again(tokenizer: Path, tmp_path: Path) -> None:
    file = tmp_path / "tokens.toml"

    def write(token: str) -> None:
        file.write_text(f'[[token]]\nname = "t"\nsha256 = "{hash_token(token)}"\nreleases = ["{MODEL}"]\n')

    def allowed(service: Service, token: str) -> bool:
        return (
            service.request("GET", "/v1/models", headers={"Authorization": f"Bearer {PREFIX}{token}"})[0]
            == 200
        )

    write(PREFIX + "one")
    with served_worker("--tokenizer", tokenizer, "--tokens", file, folder=tmp_path, module=FAKE) as service:
        assert service.started["needs_token"]
        assert allowed(service, "one")
        file.write_text("no toml")
        service.signal(signal.SIGHUP)
        until(lambda: "the earlier tokens stay valid" in service.log)
        assert allowed(service, "one")
        write(PREFIX + "two")
        service.signal(signal.SIGHUP)
        until(lambda: allowed(service, "two"))
        assert not allowed(service, "one")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--host", "0.0.0.0"], "--tokens"),
        (["--tokens", "nowhere.toml"], "no token file"),
        (["--tokens", "nowhere.toml", "--anonymous"], "exclude each other"),
        (["--host", "203.0.113.7", "--anonymous"], "cannot listen"),
        (["--response-log", "nowhere/a.jsonl"], "cannot be written"),
    ],
)
def test_a_worker_that_should_not_start(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "configure", lambda *_: None)  # the log of the tests stays as it is
    ran = CliRunner().invoke(worker, ["--model", "nowhere", "--port", "0", *arguments])
    assert isinstance(ran.exception, DraftstoreError)
    assert words in str(ran.exception)
