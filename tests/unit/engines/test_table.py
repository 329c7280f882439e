"""The table of cases run in engines matches their tests."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import ROOT, engines


@pytest.mark.parametrize("engine", engines.ENGINES)
def test_a_column_has_the_cases_of_the_tests(engine: str) -> None:
    name, package = engines.ENGINES[engine]
    columns = {head: cases for head, cases in engines.read().items() if head.startswith(f"{name} ")}
    marked = engines.marked(engine)
    assert marked <= set(engines.CASES)
    assert list(columns.values()) == ([marked] if marked else [])
    pins = [ROOT / "Makefile", *(ROOT / "tests" / f"engines_{engine}").glob("requirements.txt")]
    for head in columns:
        assert any(head.replace(f"{name} ", f"{package}==") in path.read_text() for path in pins)


def test_a_run_writes_its_own_column_with_what_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(engines, "version", lambda _: "2")
    engines.PAGE.write_text(
        f"before{engines.BEGIN}| | SGLang 1 | vLLM 1 |\n|---|---|---|\n{engines.END}after"
    )

    def ran(*cases: str) -> Any:
        return SimpleNamespace(nodeid="tests/engines_vllm/test_it.py::it", user_properties=[("cases", cases)])

    stats = {"passed": [ran("trees", "chains"), ran("streams"), ran()], "failed": [ran("trees")]}
    config: Any = SimpleNamespace(getoption=lambda _: True)
    engines.write({"SGLang 1": {"trees"}, "vLLM 1": {"trees"}})
    engines.pytest_terminal_summary(SimpleNamespace(stats=stats), config)
    assert engines.read() == {"SGLang 1": {"trees"}, "vLLM 2": {"chains", "streams"}}
    assert engines.PAGE.read_text().startswith("before")
    assert engines.PAGE.read_text().endswith("after")
