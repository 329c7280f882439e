"""The figures of one part of `benchmarks.gpu`: cells that are saved one by one, so that a part can be continued.

    sheet = Sheet(path, about, minutes=9)
    sheet.cell("batch 8", measure)          measured unless it is there already or the time is up

A cell that fails keeps its error and is measured again by the next run; the others go on.
"""

import json
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from benchmarks.measure import progress
from benchmarks.report import describe_machine, save

PACKAGES = ("torch", "transformers", "triton", "lmdb", "zstandard")
Cells = dict[str, dict[str, Any]]


class Sheet:
    """One part's file.

    Attributes:
        cells: figures by name, in the order of measurement.
    """

    def __init__(
        self, path: Path, about: Mapping[str, Any], *, minutes: float = 9.0, again: bool = False
    ) -> None:
        """Go on with a file, or begin it.

        Args:
            path: the file.
            about: what is known of the whole part.
            minutes: after so many no further cell is begun.
            again: whether to forget what is there.
        """
        self._path = path
        self._end = perf_counter() + 60 * minutes
        found = read_sheet(path) if not again else {}
        self._about = {**found, **about, "complete": False}
        self.cells: Cells = dict(found.get("cells", {}))
        self.cut: list[str] = []

    @property
    def complete(self) -> bool:
        """Whether every cell that was asked for is there."""
        return not self.cut and not any("error" in cell for cell in self.cells.values())

    def known(self, name: str) -> dict[str, Any] | None:
        """Return the figures of a cell that was measured, without an error."""
        cell = self.cells.get(name)
        return None if cell is None or "error" in cell else cell

    def cell(self, name: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
        """Return the figures of a cell; None if there was no time for it, or it failed."""
        if (known := self.known(name)) is not None:
            return known
        if perf_counter() > self._end:
            self.cut.append(name)
            return None
        progress(f"{self._path.stem}: {name}")
        begin = perf_counter()
        try:
            figures = measure()
        except Exception as error:  # noqa: BLE001 (one shape of many: the others are measured)
            traceback.print_exc()
            figures = {"error": f"{type(error).__name__}: {str(error)[:500]}"}
        figures["measured_in"] = round(perf_counter() - begin, 2)
        self.cells[name] = figures
        self.save()
        return None if "error" in figures else figures

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Run a part: what fails between its cells is kept as the error of a cell `part`, then the file is written."""
        self.cells.pop("part", None)
        try:
            yield
        except (Exception, SystemExit) as error:  # noqa: BLE001 (the other parts are run)
            traceback.print_exc()
            self.cells["part"] = {"error": f"{type(error).__name__}: {str(error)[:500]}"}
        self.save(complete=self.complete)

    def save(self, *, complete: bool = False) -> dict[str, Any]:
        """Write the file and return its content."""
        document = self._about | {"complete": complete, "cut": self.cut, "cells": self.cells}
        save(self._path.parent, self._path.stem, document)
        return document


def read_sheet(path: Path) -> dict[str, Any]:
    """Return a part's file; empty if there is none."""
    if not path.is_file():
        return {}
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def describe_device() -> dict[str, Any]:
    """Return date, machine, versions, and the GPU if there is one."""
    about = describe_machine(PACKAGES)
    if not torch.cuda.is_available():
        return about | {"device": {"name": "cpu", "threads": torch.get_num_threads()}}
    properties = torch.cuda.get_device_properties(0)
    return about | {
        "device": {
            "name": properties.name,
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "multiprocessors": properties.multi_processor_count,
            "capability": f"{properties.major}.{properties.minor}",
            "cuda": torch.version.cuda,
        }
    }


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds_of(call: Callable[[], object], repeats: int, warm_ups: int = 2) -> float:
    """Return the mean seconds of calls that follow each other without waiting."""
    for _ in range(warm_ups):
        call()
    synchronize()
    begin = perf_counter()
    for _ in range(repeats):
        call()
    synchronize()
    return (perf_counter() - begin) / repeats
