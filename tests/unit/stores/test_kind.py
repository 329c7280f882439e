"""A new kind of store is its own module and one entry of the registry: everything else then works with it."""

import json
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from draftstore.cli import cli
from draftstore.cli.inspect import info, verify
from draftstore.cli.query import query
from draftstore.errors import StoreError
from draftstore.remote.wire import DraftRequest
from draftstore.storage.manifest import load_manifest
from draftstore.stores.kind import Kind
from draftstore.stores.registry import KINDS, kind_of, open_store, strategies_of, verify_store
from draftstore.text.tokenizer import TextTokenizer
from services.lookup.releases.served import Served
from services.lookup.releases.warming import load_kernels
from services.lookup.targets import Target
from tests.fakes import imaginary_kind
from tests.fakes.imaginary_kind import SuccessorStore, make_successors


@pytest.fixture
def imaginary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register the kind: the one entry that a new kind takes."""
    monkeypatch.setitem(KINDS, imaginary_kind.NAME, imaginary_kind.__name__)


@pytest.fixture
def successors(imaginary: None, small_tokenizer: TextTokenizer, tmp_path: Path) -> Path:
    return make_successors(tmp_path / "next", small_tokenizer)


def test_it_opens_and_drafts(successors: Path) -> None:
    with closing(open_store(str(successors))) as store:
        assert type(store) is SuccessorStore
        [known, unknown] = store.drafter().draft(np.array([[7], [-1]], np.int32))
        assert (known.tree.tokens.tolist(), len(unknown.tree)) == ([8], 0)
    with pytest.raises(StoreError, match="of kind 'successors', which has no backends: leave --backend out"):
        open_store(successors, "lmdb")
    assert strategies_of(["rest", "successors", "ngrams"]) == {"backoff", "longest", "next", "small"}


def test_its_options_appear_in_command_and_flow(
    imaginary: None, small_corpus: Path, small_tokenizer: TextTokenizer, tmp_path: Path
) -> None:
    from prefect.utilities.callables import parameter_schema

    from pipelines.flows import store_flows

    small_tokenizer.save(tmp_path)
    arguments = [
        "build",
        "successors",
        "--corpus",
        small_corpus,
        "--tokenizer",
        tmp_path,
        "--out",
        tmp_path / "next",
    ]
    ran = CliRunner().invoke(cli, [*map(str, arguments), "--step", "2"], catch_exceptions=False)
    assert (ran.exit_code, ran.stdout) == (0, f"{tmp_path / 'next'}\n")
    with closing(open_store(tmp_path / "next")) as store:
        assert store.drafter().draft(np.array([[7]], np.int32))[0].tree.tokens.tolist() == [9]
    assert CliRunner().invoke(cli, [*map(str, arguments), "--step", "10"]).exit_code == 2
    flow = next(each for each in store_flows() if each.name == "build-successors")
    shown = parameter_schema(flow).properties
    expected = {
        "default": 1,
        "minimum": 1,
        "maximum": 9,
        "description": "Distance of the next id.",
        "examples": [2],
    }
    assert shown["step"].items() >= expected.items()
    assert shown.keys() >= {"name", "corpus", "tokenizer", "workers", "release", "force", "keep"}


def test_info_and_verify(successors: Path, small_tokenizer: TextTokenizer, tmp_path: Path) -> None:
    shown = CliRunner().invoke(info, [str(successors)])
    total = sum(range(small_tokenizer.vocab_size))
    assert f"sum of ids  {total:,}" in " ".join(shown.output.split(" ")), shown.output
    whole = CliRunner().invoke(verify, [str(successors)])
    assert (whole.exit_code, "is intact" in whole.output) == (0, True)
    wrong = make_successors(tmp_path / "wrong", small_tokenizer, wrong_by=1)
    told = CliRunner().invoke(verify, [str(wrong), "--json"])
    assert told.exit_code == 1
    problem = f"the successors of {wrong} add up to another sum"
    assert json.loads(told.output)["problems"] == [problem] == verify_store(wrong, load_manifest(wrong))


def test_query(successors: Path, small_tokenizer: TextTokenizer) -> None:
    ran = CliRunner().invoke(query, [str(successors), "--text", "for item", "--json"])
    assert ran.exit_code == 0, ran.output
    [node] = json.loads(ran.output)["nodes"]
    last = int(small_tokenizer.encode("for item", bos=False)[-1])
    assert (node["token"], node["parent"]) == ((last + 1) % small_tokenizer.vocab_size, -1)


def test_the_lookup_service_serves_it(successors: Path) -> None:
    target = Target("ids", successors, backend="postgres")  # which is for the kinds that have it
    with closing(Served(target)) as served:
        assert (served.kind, served.backend, served.strategies) == ("successors", "files", ("next", "small"))
        assert served.describe()["entries"] == load_manifest(successors).vocab_size
        [draft] = served.draft(
            DraftRequest("ids", "small", np.array([[41]], np.int32), 64, 0.0, None)
        ).drafts()
        assert draft.tree.tokens.tolist() == [42]


def test_its_kernels_are_loaded_with_the_others(imaginary: None) -> None:
    before = imaginary_kind.STORE_KIND.loaded
    load_kernels()
    assert imaginary_kind.STORE_KIND.loaded == before + 1


def test_every_kind_is_described_by_its_module() -> None:
    for name in KINDS:
        kind = kind_of(name)
        assert (kind.name, kind_of(name)) == (name, kind)
        assert kind.title
    counts = kind_of("ngrams")
    assert type(counts) is Kind
    assert (counts.name, counts.strategies, counts.needs_states) == ("ngrams", (), False)


def test_the_registry_imports_no_kind_before_it_is_asked_for() -> None:
    code = "import sys, draftstore.stores.registry as r; print(set(sys.modules) & set(r.KINDS.values()))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "set()"
