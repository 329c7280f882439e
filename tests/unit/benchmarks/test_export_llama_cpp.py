"""The benchmark's figures are those that the page on llama.cpp quotes."""

import json
import re

import pytest

from tests import ROOT

RESULTS = ROOT / "benchmarks" / "results" / "export_llama_cpp.json"
ROWS = {
    "llama.cpp without a file": "llama.cpp, no file",
    "llama.cpp, 5 MB": "llama.cpp, 5 MB",
    "llama.cpp, as exported by default, 20 MB": "llama.cpp, default",
    "llama.cpp, `--all`, 89 MB": "llama.cpp, --all",
    "REST store, `longest`": "longest",
    "REST store, `backoff`": "backoff",
}


@pytest.mark.parametrize("row", ROWS)
def test_the_page_quotes_the_results(row: str) -> None:
    document = json.loads(RESULTS.read_text(encoding="utf-8"))
    found = {(each["drafts"], each["context"]): each["accepted_length"] for each in document["drafts"]}
    page = (ROOT / "docs" / "llama-cpp.md").read_text(encoding="utf-8")
    quoted = re.search(rf"^\| {re.escape(row)} \| \**([\d.]+)\** \| \**([\d.]+)\** \|$", page, re.MULTILINE)
    assert quoted is not None
    lengths = [found.get((ROWS[row], context), 1.0) for context in (False, True)]
    assert [float(length) for length in quoted.groups()] == [round(length, 2) for length in lengths]
    assert (document["quick"], document["outputs"]) == (False, 101)
