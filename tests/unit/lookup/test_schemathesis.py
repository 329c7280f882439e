"""Schemathesis against a running service: every answer is as described and never a 500."""

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.fakes.sites import browse, running_site, serving

SCHEMATHESIS = Path(sysconfig.get_path("scripts")) / "schemathesis"
TOKEN = "secret-of-the-fuzzer"
# What is too long is refused before it is read; a dense release has no answer to any question (409).
CONFIGURATION = """
[checks.negative_data_rejection]
expected-statuses = [400, 401, 403, 404, 405, 409, 413, 415, 422, 429]
"""


def run(address: str, folder: Path, *arguments: str) -> str:
    """Run Schemathesis with the names of what is served in the document; return what it prints."""
    with browse(address) as client:
        document = client.get("/openapi.json").json()
    properties = document["components"]["schemas"]["Question"]["properties"]
    properties["release"] |= {"enum": ["chat", "code", "dense"]}
    properties["strategy"] |= {"enum": ["", "longest", "backoff"]}
    (folder / "openapi.json").write_text(json.dumps(document))
    (folder / "schemathesis.toml").write_text(CONFIGURATION)
    command = [
        sys.executable, str(SCHEMATHESIS), "run", "openapi.json", "--url", address, "--no-color",
        "--generation-database", "none", "--output-truncate", "true", "--seed", "4", *arguments,
    ]  # fmt: skip
    ran = subprocess.run(
        command, cwd=folder, env=os.environ | {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, "\n".join(line[:500] for line in ran.stdout.splitlines())
    return ran.stdout


@pytest.mark.slow
def test_examples_and_the_edges_of_every_field(
    small_store: Path, small_crest: Path, small_dense: Path, tmp_path: Path
) -> None:
    stores = {"chat": small_crest, "code": small_store, "dense": small_dense}
    with running_site(stores) as running, serving(running.app()) as address:
        assert "Tested: 6" in run(address, tmp_path, "--phases", "examples,coverage")
