"""Settings of a drafter inside an engine: from a file, from variables, or refused with the reason."""

from pathlib import Path

import pytest

from draftstore.assembly.sources import Sources
from draftstore.engines.config import CONFIG_VARIABLE, EngineConfig
from draftstore.errors import EngineError
from draftstore.live.store import LiveTarget


def test_a_file_names_stores_beside_it_and_corpora(tmp_path: Path) -> None:
    path = tmp_path / "draftstore.toml"
    path.write_text(
        'stores = ["chat", "/far/code"]\nlive = "team=log:2000"\nbudget = 32\nmin_prob = 1\nmetrics = 9400\n'
        '[corpora.acme]\nstores = ["acme"]\nlookup = "host:7781"\nrequest = false\n'
    )
    found = EngineConfig.read({CONFIG_VARIABLE: str(path), "DRAFTSTORE_TOKEN": "s", "DRAFTSTORE_BUDGET": "8"})
    assert found == EngineConfig(
        stores=(tmp_path / "chat", Path("/far/code")),
        live=LiveTarget("team", tmp_path / "log", 2000),
        token="s",
        budget=8,
        min_prob=1.0,
        metrics="9400",
        corpora={"acme": Sources(stores=(tmp_path / "acme",), lookup="host:7781", request=False)},
    )


def test_variables_override_the_file(tmp_path: Path) -> None:
    path = tmp_path / "draftstore.toml"
    path.write_text('stores = ["chat"]\nrequest = true\n')
    variables = {"STORES": "a:/b", "REQUEST": "false", "LIVE": "team=log", "DEADLINE": "0.01", "RELEASE": ""}
    found = EngineConfig.read(
        {CONFIG_VARIABLE: str(path), **{"DRAFTSTORE_" + name: text for name, text in variables.items()}}
    )
    assert found == EngineConfig(
        stores=(Path("a"), Path("/b")), request=False, live=LiveTarget("team", Path("log")), deadline=0.01
    )


def test_a_misspelt_variable_is_named(caplog: pytest.LogCaptureFixture) -> None:
    EngineConfig.read({"DRAFTSTORE_STORE": "a", "DRAFTSTORE_TEST_DATA": "b", "DRAFTSTORE_RESPONSE_LOG": "c"})
    assert caplog.messages == ["unknown setting DRAFTSTORE_STORE: did you mean DRAFTSTORE_STORES?"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("budget = true", "budget: must be a number, not True"),
        ("[corpora.a]\nthreads = true", r"corpora\.a\.threads: must be a number"),
        ('live = ["/a", "b", 5]', "live: must be text, not a list"),
        ("budgets = 3", "draftstore.toml: budgets: unknown field"),
        ('live = "a b"', "draftstore.toml: 'a b' is not a live store"),
        ("[corpora.a]\nbudget = 3", r"corpora\.a\.budget: unknown field"),
        ("budget = " + "[" * 9_000, "is not TOML"),
        ('[corpora.""]\nrequest = true', "at least 1 character"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "draftstore.toml"
    path.write_text(text)
    with pytest.raises(EngineError, match=reason):
        EngineConfig.read({CONFIG_VARIABLE: str(path)})


def test_what_is_wrong_with_a_variable_is_said() -> None:
    with pytest.raises(EngineError, match=r"DRAFTSTORE_BUDGET: must be a valid integer, .*not 'many'"):
        EngineConfig.read({"DRAFTSTORE_BUDGET": "many"})
    with pytest.raises(EngineError, match=r"no settings at /nowhere.toml"):
        EngineConfig.read({CONFIG_VARIABLE: "/nowhere.toml"})


@pytest.mark.parametrize(
    "text",
    [
        '[[corpora]]\ntoken = "s3cret"',
        '[[corpora.acme]]\ntoken = "s3cret"',
        '[corpora]\ntoken = "s3cret"',
        'token = ["s3cret"]',
    ],
)
def test_an_error_prints_no_token(tmp_path: Path, text: str) -> None:
    path = tmp_path / "draftstore.toml"
    path.write_text(text)
    with pytest.raises(EngineError) as raised:
        EngineConfig.read({CONFIG_VARIABLE: str(path)})
    assert "s3cret" not in str(raised.value)
