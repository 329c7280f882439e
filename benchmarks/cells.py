"""Cells: measurements one after the other, under a deadline, each saved as soon as it is known.

    figures = cells.measure("curve", "8 x 16", measure)          None: no time was left, or it failed

A cell that fails keeps its error, one that takes too long is interrupted, and the next one is measured. A process that
resumes what another one left repeats no known cell, not even the one that ended that process.
"""

import json
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from benchmarks.measure import progress
from draftstore.storage.files import write_json

Figures = dict[str, Any]

GPU_BROKEN = 4
"""Exit status where a cell leaves a GPU that does nothing any more: another process may resume."""
ALARM_AGAIN = 5.0
"""Seconds after which an interrupted cell is interrupted again: what it called may have handled the first alarm."""
TABLE_WIDTH = 128
HIDDEN = frozenset({"texts", "rows", "context", "measured_in", "capture_s_top8", "steps", "seconds"})
"""Figures that the table leaves out."""


class OutOfTime(BaseException):
    """A cell takes too long; no Exception, since drafters and checks handle these."""


class Cells:
    """The cells of a run: figures by stage and name, in the order of measurement; those for which no time was left."""

    def __init__(self, out: Path, about: Mapping[str, Any], end: float, *, resume: bool) -> None:
        """Begin with entries of results.json, until a time of `perf_counter`; or resume what is there."""
        self._path, self._about, self._end = out / "results.json", about, end
        known = json.loads(self._path.read_bytes()) if resume and self._path.exists() else {}
        self.stages: dict[str, dict[str, Figures]] = known.get("stages", {})
        self.cut: list[str] = []
        self._measuring = False
        signal.signal(signal.SIGALRM, self._alarm)

    def _alarm(self, *_: object) -> None:
        if self._measuring:
            raise OutOfTime

    def left(self) -> float:
        """Return the seconds until the deadline."""
        return self._end - perf_counter()

    def measure(
        self, stage: str, name: str, measure: Callable[[], Figures], *, need: float = 3.0, most: float = 120.0
    ) -> Figures | None:
        """Measure a cell unless it is known, or fewer than `need` seconds are left; interrupt it after `most`."""
        cells = self.stages.setdefault(stage, {})
        if name not in cells:
            if self.left() < need:
                self.cut.append(f"{stage}: {name}")
                return None
            self.keep(stage, name, {"error": "the process ended"})
            begin = perf_counter()
            found = self._try(measure, most)
            self.keep(stage, name, found | {"measured_in": round(perf_counter() - begin, 2)})
            if "error" in found and not _gpu_works():
                sys.exit(GPU_BROKEN)
        return None if "error" in cells[name] else cells[name]

    def _try(self, measure: Callable[[], Figures], most: float) -> Figures:
        """Return the figures of a cell, or its error."""
        try:
            try:
                self._measuring = True
                signal.setitimer(signal.ITIMER_REAL, max(1.0, min(most, self.left())), ALARM_AGAIN)
                return measure()
            finally:
                self._measuring = False
                signal.setitimer(signal.ITIMER_REAL, 0)
        except (Exception, OutOfTime) as error:  # noqa: BLE001 (the other cells are measured)
            return failed(error)

    def keep(self, stage: str, name: str, found: Figures) -> None:
        """Save the figures of a cell."""
        self.stages.setdefault(stage, {})[name] = found
        self._save()
        progress(f"{max(0.0, self.left()):6.1f} s left  {_line(stage, name, found)}")

    def _save(self) -> None:
        write_json(self._path, {**self._about, "cut": self.cut, "stages": self.stages})

    def show(self) -> None:
        """Print a line for each cell, and what was cut."""
        self._save()
        for stage, cells in self.stages.items():
            for name, found in cells.items():
                print(_line(stage, name, found)[:TABLE_WIDTH])
        print(f"cut: {len(self.cut)} {self.cut[:12]}")


def failed(error: BaseException) -> Figures:
    """Return the figures of what has failed, and log the traceback."""
    traceback.print_exception(error)
    return {"error": f"{type(error).__name__}: {str(error)[:400]}"}


def _line(stage: str, name: str, found: Figures) -> str:
    shown = [
        (key, value) for key, value in found.items() if key not in HIDDEN and not isinstance(value, list)
    ]
    return f"{stage:7} {name:32} " + " ".join(f"{key}={value}" for key, value in shown)


def _gpu_works() -> bool:
    """Return whether the GPU, if there is one, still does anything: not after an illegal address, for example."""
    try:
        return bool(torch.ones(1, device="cuda" if torch.cuda.is_available() else "cpu").item())
    except RuntimeError:
        return False
