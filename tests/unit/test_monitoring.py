"""Alert rules and dashboard: they parse, and the services emit every metric and label that they use."""

import json
import re
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
METRIC = re.compile(r"\b(?:draftstore_|process_|vllm:)\w+")
LABELS = re.compile(r"\b(?:by|on) ?\(([^)]*)\)|\{([^}]*)\}")


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


def labels_of(expression: str) -> set[str]:
    """Return the labels that an expression selects or groups by."""
    lists = ["".join(found) for found in LABELS.findall(expression)]
    return {
        label for one in lists for label in re.findall(r"(\w+)(?=\s*(?:[=!,]|$))", re.sub('"[^"]*"', "", one))
    }


@pytest.mark.parametrize("expression", expressions())
def test_expressions_use_what_is_emitted(emitted: dict[str, set[str]], expression: str) -> None:
    metrics = set(METRIC.findall(expression))
    assert metrics
    assert metrics <= emitted.keys()
    assert labels_of(expression) <= {label for metric in metrics for label in emitted[metric]} | ADDED
    for opened, closed in ("()", "{}", "[]"):
        assert expression.count(opened) == expression.count(closed)


def test_alerts_say_how_bad_it_is_and_what_to_do(emitted: dict[str, set[str]]) -> None:
    assert len({rule["alert"] for rule in rules()}) == len(rules())
    for rule in rules():
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert rule["annotations"].keys() == {"summary", "description"}
        used = set(re.findall(r"\$labels\.(\w+)", json.dumps(rule["annotations"])))
        metrics = METRIC.findall(rule["expr"])
        assert used <= {label for metric in metrics for label in emitted[metric]} | ADDED
