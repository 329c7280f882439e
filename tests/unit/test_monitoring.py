"""Alert rules and dashboard: they parse, and every metric and label that they use is one that the services emit."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from prometheus_client.parser import text_string_to_metric_families

from services.worker.engine import Facts
from services.worker.figures import WorkerMetrics
from tests import ROOT
from tests.fakes.sites import running_site

FOLDER = ROOT / "services" / "monitoring"
ADDED = {"instance", "job"}
"""Labels that Prometheus adds."""
PREFIXES = "draftstore_", "process_", "vllm:"
JOINS = {"and", "by", "on", "or"}
FUNCTIONS = {"absent", "changes", "count", "histogram_quantile", "increase", "max", "rate", "sum", "vector"}
GRAMMAR = re.compile(
    r"""
    \s*(?: (?P<string> "[^"\\]*")
         | (?P<duration> \[(?: \d+[smhd] | \$__rate_interval )\](?: \s+offset\s+\d+[smhd])?)
         | (?P<number> \d+(?:\.\d+)?)
         | (?P<name> [a-zA-Z_][\w:]*)
         | (?P<operator> [=!]~ | [<>=!]= | [-+*/<>=(){},]) )
    """,
    re.VERBOSE,
)


@pytest.fixture(scope="module")
def emitted(small_store: Path) -> dict[str, set[str]]:
    """Return the labels of every sample of both services by its name."""
    worker = WorkerMetrics()
    worker.describe(Facts("m", 1, 1, frozenset()), lambda: 0, lambda: 0)
    with running_site({"chat": small_store}) as running:
        running.metrics.watch_catalogue(lambda: 1.0, lambda: 0.0)
        texts = running.metrics.text(), worker.text()
    found: dict[str, set[str]] = {}
    for text in texts:
        for family in text_string_to_metric_families(text.decode()):
            for sample in family.samples:
                found.setdefault(sample.name, set()).update(sample.labels)
    return found


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((FOLDER / "dashboard.json").read_text())["panels"]
    return found


def expressions() -> list[str]:
    targets = [target for panel in panels() for target in panel.get("targets", [])]
    return [rule["expr"] for rule in rules()] + [target["expr"] for target in targets]


def words_of(expression: str) -> Iterator[tuple[str, str]]:
    """Yield kind and text of every word; fail at what belongs into no expression."""
    place = 0
    while place < len(expression.rstrip()):
        found = GRAMMAR.match(expression, place)
        assert found, f"{expression!r} at {expression[place:]!r}"
        place = found.end()
        assert found.lastgroup
        yield found.lastgroup, found[found.lastgroup]


def check_brackets(words: list[tuple[str, str]]) -> None:
    """Check that brackets close in order, and that a duration follows a series."""
    opened: list[str] = []
    before = ""
    for kind, word in words:
        if kind == "operator" and word in "({":
            opened.append(word)
        elif kind == "operator" and word in ")}":
            assert opened.pop() + word in ("()", "{}")
        elif kind == "duration":
            assert before == "}" or before.startswith(PREFIXES)
        before = word
    assert opened == []


@pytest.mark.parametrize("expression", expressions())
def test_expressions_use_what_is_emitted(emitted: dict[str, set[str]], expression: str) -> None:
    words = list(words_of(expression))
    check_brackets(words)
    metrics = {word for kind, word in words if kind == "name" and word.startswith(PREFIXES)}
    assert metrics
    assert metrics - emitted.keys() == set()
    labels = {label for metric in metrics for label in emitted[metric]} | ADDED
    for place, (kind, word) in enumerate(words):
        if kind != "name" or word in metrics:
            continue
        following = words[place + 1][1]
        if following == "(" and words[place - 1][1] not in ("by", "on"):
            assert word in FUNCTIONS | JOINS
        elif word in FUNCTIONS:
            assert following == "by"
        elif word not in JOINS:
            assert word in labels


def test_alerts_say_how_bad_it_is_and_what_to_do(emitted: dict[str, set[str]]) -> None:
    names = [rule["alert"] for rule in rules()]
    assert len(set(names)) == len(names) > 10
    for rule in rules():
        assert rule.keys() - {"for"} == {"alert", "expr", "labels", "annotations"}
        assert re.fullmatch(r"[A-Z]\w+", rule["alert"])
        assert re.fullmatch(r"\d+[smh]", rule.get("for", "1m"))
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert rule["annotations"].keys() == {"summary", "description"}
        used = set(re.findall(r"\$labels\.(\w+)", json.dumps(rule["annotations"])))
        metrics = {word for kind, word in words_of(rule["expr"]) if word.startswith(PREFIXES)}
        assert used <= {label for metric in metrics for label in emitted[metric]} | ADDED


def test_the_dashboard_is_whole(emitted: dict[str, set[str]]) -> None:
    document = json.loads((FOLDER / "dashboard.json").read_text())
    assert document["uid"] == "draftstore"
    assert len({panel["id"] for panel in panels()}) == len(panels())
    cells: set[tuple[int, int]] = set()
    for panel in panels():
        place = panel["gridPos"]
        covered = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert max(x for x, _ in covered) < 24
        assert not covered & cells
        cells |= covered
        if panel["type"] != "row":
            assert panel["title"]
            assert panel["description"]
            assert panel["datasource"]["uid"] == "${datasource}"
    [source, instance] = document["templating"]["list"]
    assert (source["name"], instance["name"]) == ("datasource", "instance")
    named = re.findall(r"draftstore_\w+", instance["query"]["query"])
    assert set(named) <= emitted.keys()
