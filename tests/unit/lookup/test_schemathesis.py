"""Schemathesis against the running service: whatever is asked, the answer is as described, and never a 500."""

import json
import os
import subprocess
import sys
import sysconfig
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.sites import Running, grant, running_site, serving

SCHEMATHESIS = Path(sysconfig.get_path("scripts")) / "schemathesis"
TOKEN = "secret-of-the-fuzzer"


@pytest.fixture(scope="module")
def service(small_store: Path, small_crest: Path, small_dense: Path) -> Iterator[tuple[Running, str]]:
    with (
        running_site({"chat": small_crest, "code": small_store, "dense": small_dense}) as running,
        serving(running.app()) as address,
    ):
        yield running, address


@pytest.fixture(scope="module")
def guarded(small_crest: Path) -> Iterator[str]:
    tokens = grant("fuzzer", TOKEN, "*")
    with running_site({"chat": small_crest}, tokens) as running, serving(running.app()) as address:
        yield address


def known_names(address: str, folder: Path) -> Path:
    """Write the document of a service with the names of what it serves, so that many questions get a draft."""
    with urllib.request.urlopen(f"{address}/openapi.json", timeout=60) as response:
        document: Any = json.load(response)
    schemas = document["components"]["schemas"]
    for name in ("TextQuestion", "TokensQuestion"):
        schemas[name]["properties"]["release"] |= {"enum": ["chat", "code", "dense"]}
        schemas[name]["properties"]["strategy"] |= {"enum": ["", "longest", "backoff"]}
    path = folder / "openapi.json"
    path.write_text(json.dumps(document))
    return path


CONFIGURATION = """
# What is too long for any question is refused before it is read; a dense release has no answer to any question (409).
[checks.negative_data_rejection]
expected-statuses = [400, 401, 403, 404, 405, 409, 413, 415, 422, 429]
"""


def run(place: Path | str, address: str, folder: Path, *arguments: str) -> str:
    """Run Schemathesis, and return what it prints."""
    assert SCHEMATHESIS.is_file()
    command = [
        sys.executable, str(SCHEMATHESIS), "run", str(place), "--url", address, "--no-color",
        "--generation-database", "none", "--output-truncate", "true", "--seed", "4", *arguments,
    ]  # fmt: skip
    (folder / "schemathesis.toml").write_text(CONFIGURATION)
    environment = {**os.environ, "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    ran = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=400, check=False
    )
    shown = "\n".join(line[:500] for line in (ran.stdout + ran.stderr).splitlines())
    assert ran.returncode == 0, shown
    return shown


def test_examples_and_the_edges_of_every_field(service: tuple[Running, str], tmp_path: Path) -> None:
    _, address = service
    printed = run(known_names(address, tmp_path), address, tmp_path, "--phases", "examples,coverage")
    assert "Tested: 7" in printed


def fuzz(place: Path | str, address: str, folder: Path, examples: int, *arguments: str) -> str:
    """Run the fuzzing phase with so many cases for each operation that takes any input."""
    return run(place, address, folder, "--phases", "fuzzing", "--max-examples", str(examples), *arguments)


@pytest.mark.slow
def test_fuzzing(service: tuple[Running, str], tmp_path: Path) -> None:
    """Half of the cases break the schema, and must be refused.

    With 250 cases, what goes wrong in one of 84 is found 19 times in 20: (83 / 84)²⁵⁰ is 0.05.
    """
    running, address = service
    before = running.workers.figures.totals()
    fuzz(known_names(address, tmp_path), address, tmp_path, 250)
    fuzz(f"{address}/openapi.json", address, tmp_path, 50)
    after = running.workers.figures.totals()
    assert sum(t.queries for t in after.values()) > sum(t.queries for t in before.values()) + 50
    with urllib.request.urlopen(f"{address}/healthz", timeout=60) as response:
        assert response.status == 200


@pytest.mark.slow
def test_fuzzing_a_service_that_asks_for_tokens(guarded: str, tmp_path: Path) -> None:
    """With a token in the header, and with what Schemathesis makes up in its place."""
    document = known_names(guarded, tmp_path)
    fuzz(document, guarded, tmp_path, 50, "--header", f"Authorization:Bearer {TOKEN}")
    run(document, guarded, tmp_path, "--phases", "coverage,fuzzing", "--max-examples", "50")
