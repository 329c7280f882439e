import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from draftstore.cli import cli
from draftstore.cli.plan import TokenCount, in_bytes
from draftstore.cli.rates import FEWEST
from draftstore.errors import DraftstoreError
from draftstore.sizing import LAWS, RATES
from draftstore.stores.rest.build import RestOptions, build_rest
from draftstore.text.tokenizer import TextTokenizer
from tests.conftest import write_texts


def call(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["plan", *map(str, arguments)])


def planned(*arguments: object) -> Any:
    result = call(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("1e11", 1e11),
        ("300M", 3e8),
        ("2.5B", 2.5e9),
        ("1.5e3k", 1.5e6),
        ("7", 7.0),
        ("1T", 1e12),
        ("4G", 4e9),
    ],
)
def test_numbers_of_tokens_have_units(text: str, tokens: float) -> None:
    assert TokenCount().convert(text, None, None) == tokens


@pytest.mark.parametrize("text", ["many", "-5", "1e", "10MB", "", "1e999"])
def test_no_number_of_tokens_is_refused(text: str) -> None:
    result = call("--tokens", text)
    assert result.exit_code == 2
    assert "expected one such as 1e11, 300M or 2.5B" in result.stderr


def test_a_plan_names_every_step_rate_and_law() -> None:
    result = call(
        "--tokens", "1e11", "--machines", 16, "--cores", 32, "--memory", "256GB", "--vocabulary", 128000
    )
    assert result.exit_code == 0, result.output
    for words in (
        *RATES,
        *LAWS,
        "100,000,000,000 tokens",
        "855 GB",
        "at once on a machine",
        "tokenize, on all machines",
    ):
        assert words in result.stdout


def test_units_of_options_reach_the_plan() -> None:
    site = planned(
        "--tokens", "1e9", "--memory", "1TB", "--disk-bandwidth", "500MB", "--disk-latency", 80, "--added", "10M"
    )["site"]  # fmt: skip
    assert (site["memory"], site["disk_bandwidth"], site["added"]) == (10**12, 500_000_000, 1e7)
    assert site["disk_latency"] == pytest.approx(80e-6)


def test_nonsense_is_one_sentence() -> None:
    result = call("--tokens", "1e11", "--memory", "1GB")
    assert isinstance(result.exception, DraftstoreError)
    assert "take --segment-tokens" in str(result.exception)


@pytest.mark.parametrize(
    ("size", "text"), [(1.5e12, "1.5 TB"), (2e9, "2 GB"), (1e3, "0.001 MB"), (4e15, "4,000 TB")]
)
def test_bytes_have_units(size: float, text: str) -> None:
    assert in_bytes(size) == text


def test_rates_of_this_machine_replace_the_quoted_ones(small_store: Path) -> None:
    rates = planned("--tokens", "1e9", "--measure", small_store)["rates"]
    measured = {name for name, rate in rates.items() if rate["source"].startswith("measured here")}
    assert measured == {"tokenize", "sort"}
    assert all(rates[name]["value"] > 0 for name in measured)


def test_a_store_of_few_tokens_measures_nothing(tmp_path: Path, small_tokenizer: TextTokenizer) -> None:
    texts = write_texts(tmp_path / "texts.jsonl", 2)
    store = build_rest(RestOptions((texts,), "small"), small_tokenizer, tmp_path / "store").path
    result = call("--tokens", "1e9", "--measure", store)
    assert f"expected {FEWEST:,} to measure with" in str(result.exception)
