"""What the parts of `benchmarks.gpu` share: how much is measured, models, stores, recordings."""

import argparse
import dataclasses
import gc
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import CHAT, RecordingSet, Source, Workspace, evenly
from benchmarks.forced import SHAPES, random_model
from benchmarks.gpu_kit import join_wheel
from benchmarks.gpu_sheet import Sheet
from benchmarks.smollm import smollm
from draftstore.decoding.replay import Recording, read_recordings
from draftstore.hf.loading import LoadedModel, load_model
from draftstore.stores.rest.build import RestOptions, build_rest
from draftstore.stores.rest.store import RestStore
from draftstore.text.tokenizer import TextTokenizer

RECORDED = RecordingSet("alpaca_eval.jsonl.zst", "vicuna-7b-v1.5")
INSTRUCTIONS = ("chat_instruct_mix.jsonl.zst",)
POSITIONS = 2048


@dataclasses.dataclass(frozen=True)
class Extent:
    """How much is measured.

    Attributes:
        shapes: of Llama.
        batches: texts at a time.
        rows: of each text in a pass.
        contexts: tokens before a pass.
        together: most rows of a pass.
        repeats: of a timed pass.
        tokens: of a forced or live output.
        longest: most tokens of a prompt.
        requests: at least so many for each number of texts, and at least twice as many as texts.
        budgets: nodes of a draft, where they are not planned.
        live: prompts that the live model answers.
        store: the source of REST drafts for forced outputs.
        dense: the source of the dense store.
        nodes: budgets at which dense drafts and REST are compared.
        texts: recordings whose states are read.
        matrix: rows and columns of the matrix product that gives the peak.
        copied: bytes of the copy that gives the bandwidth.
    """

    shapes: tuple[str, ...] = ("1b", "8b")
    batches: tuple[int, ...] = (1, 4, 8, 16, 32)
    rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 96, 128)
    contexts: tuple[int, ...] = (512, 1536)
    together: int = 4096
    repeats: int = 7
    tokens: int = 128
    longest: int = 256
    requests: int = 4
    budgets: tuple[int, ...] = (16, 64)
    live: int = 16
    store: Source = CHAT
    dense: Source = Source("gpu_instructions", INSTRUCTIONS, tokens=2_200_000)  # noqa: RUF009 (frozen)
    nodes: tuple[int, ...] = (8, 16, 32, 64)
    texts: int = 256
    matrix: int = 8192
    copied: int = 2**32


QUICK = Extent(
    shapes=("tiny",), batches=(1, 2), rows=(1, 4), contexts=(16,), together=8, repeats=1, tokens=8, longest=16,
    requests=2, budgets=(4,), live=2, store=Source("gpu_chat", CHAT.files, tokens=50_000),
    dense=Source("gpu_instructions_tiny", INSTRUCTIONS, tokens=2_000), nodes=(8,), texts=4, matrix=64, copied=2**16,
)  # fmt: skip


class Bench:
    """Models and texts, made when they are first asked for.

    Attributes:
        space: where data is read and stores are built.
        extent: how much is measured.
        args: the command line.
    """

    def __init__(self, space: Workspace, args: argparse.Namespace) -> None:
        """Prepare nothing yet."""
        self.space, self.args = space, args
        extent = QUICK if args.quick else Extent()
        self.extent = extent if args.shapes is None else dataclasses.replace(extent, shapes=args.shapes)
        self._model: tuple[str, Any] | None = None

    @cached_property
    def rest(self) -> RestStore:
        """The store that drafts for forced outputs come from."""
        return self.space.store(self.extent.store)

    @cached_property
    def recordings(self) -> list[Recording]:
        """The recorded outputs, in the vocabulary of the store, in an order that mixes long and short ones."""
        found = self.space.recordings(RECORDED)
        return evenly([each for each in found if len(each.output) > 1], len(found))

    @property
    def vocab_size(self) -> int:
        """Ids of the recordings."""
        return int(self.space.tokenizer.vocab_size)

    def model(self, shape: str) -> Any:
        """Return the model of a shape with random weights; the last one asked for stays in memory."""
        if self._model is None or self._model[0] != shape:
            self.forget()
            self._model = shape, random_model(SHAPES[shape], self.vocab_size, positions=POSITIONS)
        return self._model[1]

    def forget(self) -> None:
        """Free the memory of the model in hand, and of its graphs."""
        self._model = None
        free()

    @cached_property
    def live(self) -> LoadedModel:
        """The model that answers live, in float32.

        Raises:
            SystemExit: it is neither named nor carried.
        """
        wheels = self.space.wheels or join_wheel(self.args.kit, self.space.work / "wheels")
        folder = smollm(dataclasses.replace(self.space, wheels=wheels), self.args.model)
        return load_model(folder, dtype="float32")

    @cached_property
    def questions(self) -> list[Recording]:
        """Prompts for the live model, in its own vocabulary, with outputs of another model."""
        path = self.space.data / "replays" / RECORDED.file
        found = read_recordings(path, self.live.text, model=RECORDED.model)
        short = [each for each in found if len(each.prompt) <= self.extent.longest and len(each.output) > 1]
        return evenly(short, self.extent.live)

    @cached_property
    def dense_corpus(self) -> Path:
        """The corpus of the dense store, and of the REST store beside it."""
        (path,) = self.space.inputs(self.extent.dense)
        return path

    def rest_of(self, corpus: Path, tokenizer: TextTokenizer) -> RestStore:
        """Return a store of a corpus in a live model's vocabulary."""
        out = self.space.work / "stores" / f"{corpus.stem}-{tokenizer.fingerprint[:8]}"
        build_rest(RestOptions(corpus=(corpus,), name=corpus.stem), tokenizer, out)
        return RestStore.open(out)


class Part:
    """One part in one run: its bench, its sheet, and the shape that it is about, if any."""

    def __init__(self, bench: Bench, sheet: Sheet, shape: str = "") -> None:
        """Hold them."""
        self.bench, self.sheet, self.shape = bench, sheet, shape
        self.extent = bench.extent
        self.cell, self.known = sheet.cell, sheet.known


def free() -> None:
    """Return memory that nobody uses to the GPU."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
