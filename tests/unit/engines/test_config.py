"""Settings of a drafter inside an engine: from a file, from variables, or refused with the reason."""

from pathlib import Path

import pytest

from draftstore.assembly import Sources
from draftstore.engines.config import CONFIG_VARIABLE, EngineConfig
from draftstore.errors import EngineError


def test_a_file_names_stores_beside_it_and_corpora(tmp_path: Path) -> None:
    path = tmp_path / "draftstore.toml"
    path.write_text(
        'stores = ["chat", "/far/code"]\nbudget = 32\nmin_prob = 1\nmetrics = 9400\n'
        '[corpora.acme]\nrelease = "acme"\nlookup = "host:7781"\nrequest = false\n'
    )
    found = EngineConfig.read({CONFIG_VARIABLE: str(path), "DRAFTSTORE_TOKEN": "s", "DRAFTSTORE_BUDGET": "8"})
    assert found.sources == Sources(stores=(tmp_path / "chat", Path("/far/code")), token="s", request=True)
    assert found.corpora == {"acme": Sources(release="acme", lookup="host:7781", request=False)}
    assert (found.budget, found.min_prob, found.metrics) == (8, 1, 9400)


def test_a_misspelt_variable_is_named(caplog: pytest.LogCaptureFixture) -> None:
    EngineConfig.read({"DRAFTSTORE_STORE": "a", "DRAFTSTORE_TEST_DATA": "b", "DRAFTSTORE_RESPONSE_LOG": "c"})
    assert caplog.messages == ["unknown setting DRAFTSTORE_STORE: did you mean DRAFTSTORE_STORES?"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("budgets = 3", r"unknown setting 'budgets'; known settings are stores, "),
        ('budget = "3"', "budget is '3', expected a whole number"),
        ("budget = true", "budget is True, expected a whole number"),
        ('stores = "a"', "stores is 'a', expected a list"),
        ("metrics = 0.5", "metrics is 0.5, expected a whole number or text"),
        ("budget = 0", "a budget of 0 nodes: expected 1 to 4,096"),
        ("budget = 4097", "a budget of 4097 nodes: expected 1 to 4,096"),
        ("min_prob = 2", "a minimum probability of 2: expected 0 to 1"),
        ("deadline = 61", "deadline: .*less than or equal to 60"),
        ("stores = [3]", "stores contains 3, expected folders as text"),
        ("corpora = 3", r"expected corpora as tables \[corpora.NAME\], found an int"),
        ("corpora.a = 3", r"\[corpora.a\]: expected a table"),
        ("[corpora.a]\nbudget = 3", r"\[corpora.a\]: unknown setting 'budget'"),
        ("budget = " + "[" * 9_000, "is not TOML"),
        ('[corpora.""]\nrequest = true', "a corpus with an empty name"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "draftstore.toml"
    path.write_text(text)
    with pytest.raises(EngineError, match=reason):
        EngineConfig.read({CONFIG_VARIABLE: str(path)})


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("BUDGET", "many", "DRAFTSTORE_BUDGET='many': expected a whole number"),
        ("REQUEST", "maybe", "DRAFTSTORE_REQUEST='maybe': expected true or false"),
        ("MIN_PROB", "x", "DRAFTSTORE_MIN_PROB='x': expected a number"),
        ("ENGINE_CONFIG", "/nowhere.toml", "no settings at /nowhere.toml"),
    ],
)
def test_what_is_wrong_with_a_variable_is_said(name: str, text: str, reason: str) -> None:
    with pytest.raises(EngineError, match=reason):
        EngineConfig.read({"DRAFTSTORE_" + name: text})
