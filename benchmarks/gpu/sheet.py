"""Shared code of the parts: extent of measurement, models and texts, and resumable files of cells.

    sheet.cell("batch 8", measure)          measured unless already present or time is up

A failed cell keeps its error and is measured again by the next run; the other cells continue.
"""

import argparse
import dataclasses
import gc
import json
import traceback
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from benchmarks.common import CHAT, RecordingSet, Source, Workspace, evenly
from benchmarks.gpu.forced import SHAPES, random_model
from benchmarks.measure import progress
from benchmarks.report import describe_machine, save
from draftstore.decoding.curve import CostCurve
from draftstore.decoding.replay import Recording
from draftstore.hf.tuning import measure
from draftstore.stores.rest.store import RestStore

RECORDED = RecordingSet("alpaca_eval.jsonl.zst", "vicuna-7b-v1.5")
POSITIONS = 2048
MINUTES = 8.5
"""Minutes after which a part starts no further cell, so that the last one ends within nine."""
PACKAGES = ("torch", "transformers", "triton", "lmdb", "zstandard")


@dataclasses.dataclass(frozen=True)
class Extent:
    """The extent of measurement.

    `batches` are texts per batch, `rows` the rows of each text in a pass (at most `together` in all), `contexts` the
    tokens before it. Outputs have `tokens` tokens, prompts at most `longest`, unplanned drafts from `store` `budgets`.
    """

    shapes: tuple[str, ...] = ("1b", "8b")
    batches: tuple[int, ...] = (1, 4, 8, 16, 32)
    rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 96, 128)
    contexts: tuple[int, ...] = (512, 1536)
    together: int = 4096
    repeats: int = 7
    tokens: int = 128
    longest: int = 256
    budgets: tuple[int, ...] = (16, 64)
    store: Source = CHAT


QUICK = Extent(
    shapes=("tiny",), batches=(1, 2), rows=(1, 4), contexts=(16,), together=8, repeats=1, tokens=8, longest=64,
    budgets=(4,), store=Source("gpu_chat", CHAT.files, tokens=50_000),
)  # fmt: skip


class Bench:
    """Models and texts, made when first needed.

    Attributes:
        space: the folders.
        extent: the extent of measurement.
        args: the command line.
    """

    def __init__(self, space: Workspace, args: argparse.Namespace) -> None:
        self.space, self.args = space, args
        self.extent = QUICK if args.quick else Extent()
        self._model: tuple[str, Any] | None = None

    @cached_property
    def rest(self) -> RestStore:
        """The store of drafts for forced outputs."""
        return self.space.store(self.extent.store)

    @cached_property
    def recordings(self) -> list[Recording]:
        """Recorded outputs of equal length in the vocabulary of the store, with distinct prompts."""
        tokens, longest = self.extent.tokens, self.extent.longest
        found = {tuple(each.prompt[-longest:].tolist()): each for each in self.space.recordings(RECORDED)}
        cut = [
            dataclasses.replace(each, prompt=each.prompt[-longest:], output=each.output[:tokens])
            for each in found.values()
            if len(each.output) >= tokens
        ]
        return evenly(cut, len(cut))

    @property
    def vocab_size(self) -> int:
        """Ids of the recordings."""
        return int(self.space.tokenizer.vocab_size)

    def model(self, shape: str) -> Any:
        """Return the model of a shape with random weights; the last one stays in memory."""
        if self._model is None or self._model[0] != shape:
            self._model = None
            free()
            self._model = shape, random_model(SHAPES[shape], self.vocab_size, POSITIONS)
        return self._model[1]

    def curve(self, model: Any, name: str) -> CostCurve:
        """Measure the cost curve of a model."""
        size: dict[str, Any] = {"context": 16, "repeats": 1} if self.args.quick else {}
        return measure(model, name=name, **size)


class Sheet:
    """One part in one run.

    Attributes:
        bench: models and texts.
        shape: shape that the part measures, if any.
        cells: figures by name, in the order of measurement.
        cut: cells skipped for lack of time.
    """

    def __init__(self, bench: Bench, path: Path, about: Mapping[str, Any], shape: str) -> None:
        """Resume a file, or start it."""
        self.bench, self.shape = bench, shape
        self._path, self._end = path, perf_counter() + MINUTES * 60
        self._about = dict(about)
        found = {} if bench.args.again else read_sheet(path)
        self.cells: dict[str, dict[str, Any]] = dict(found.get("cells", {}))
        self.cut: list[str] = []

    @property
    def complete(self) -> bool:
        """Whether every cell is present."""
        return not self.cut and not any("error" in cell for cell in self.cells.values())

    def known(self, name: str) -> bool:
        """Return True if a cell was measured without an error."""
        return name in self.cells and "error" not in self.cells[name]

    def cell(self, name: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
        """Return the figures of a cell; None if time was up or it failed."""
        if self.known(name):
            return self.cells[name]
        if perf_counter() > self._end:
            self.cut.append(name)
            return None
        progress(f"{self._path.stem}: {name}")
        begin = perf_counter()
        try:
            figures = measure()
        except Exception as error:  # noqa: BLE001 (the other cells are measured)
            traceback.print_exc()
            figures = {"error": f"{type(error).__name__}: {str(error)[:500]}"}
        figures["measured_in"] = round(perf_counter() - begin, 2)
        self.cells[name] = figures
        self.save()
        return figures if self.known(name) else None

    def save(self, *, complete: bool = False) -> None:
        """Write the file."""
        document = self._about | {"complete": complete, "cut": self.cut, "cells": self.cells}
        save(self._path.parent, self._path.stem, document)


def read_sheet(path: Path) -> dict[str, Any]:
    """Return a part's file; empty if there is none."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return found


def describe_device() -> dict[str, Any]:
    """Return date, machine, versions, and the GPU if there is one."""
    about = describe_machine(PACKAGES)
    if not torch.cuda.is_available():
        return about | {"device": {"name": "cpu", "threads": torch.get_num_threads()}}
    device = torch.cuda.get_device_properties(0)
    memory = round(device.total_memory / 2**30, 1)
    return about | {"device": {"name": device.name, "memory_gib": memory, "cuda": torch.version.cuda}}


def free() -> None:
    """Return unused memory to the GPU."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
