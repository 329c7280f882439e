"""Accepted length by tokens of text: nested samples of documents that differ only in size.

The hash of a document's text decides its samples, so each has its share of every file; the next larger one contains all
of it. A line in log10(tokens) is fitted to the samples.
"""

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from benchmarks.common import (
    CHAT,
    Workspace,
    accepted_length,
    download_wheels,
    python_files,
    write_records,
)
from benchmarks.measure import progress
from benchmarks.quality.replays import REPLAYS
from benchmarks.report import save_svg, show_rows
from draftstore.storage.report import ReadReport
from draftstore.stores.crest.build import CrestOptions, build_crest
from draftstore.stores.registry import open_store
from draftstore.stores.rest.build import RestOptions, build_rest
from draftstore.text.corpus import find_files, read_files
from draftstore.text.records import Document

CHAT_FILES = (
    "chat_atlas", "chat_instruct_mix", "chat_sharegpt", "code_instruct", "llm_arena_hard", "llm_flask",
    "llm_oasst_reports", "llm_reasoning", "llm_wildbench",
)  # fmt: skip
LARGE_LIST = "code_packages_large.txt"
SHARES, QUICK_SHARES = (0.01, 0.03, 0.1, 0.3, 1.0), (0.001, 0.003, 0.01)
MEGABYTES, QUICK_MEGABYTES = (10, 50), (1,)
NODES = (16, 64)
ROWS, QUICK_ROWS = 100, 4
FAR = 1e10
PICTURE = Path("docs/growth.svg")
ALPACA, HUMANEVAL = "AlpacaEval: Vicuna-7B-v1.5", "HumanEval: CodeLlama-7b-Instruct"
TESTS = {"chat": (ALPACA, HUMANEVAL), "code": (HUMANEVAL,)}
"""Recorded outputs by kind of text."""


def measure_growth(space: Workspace, kinds: Sequence[str], *, quick: bool) -> dict[str, Any]:
    """Measure all samples, fit the lines, print the table, and draw the picture unless --quick."""
    lines = [line for kind in kinds for line in _lines(space, kind, quick)]
    show_rows("M = offset + slope * log10(tokens)", [{**line, "M": str(line["M"])} for line in lines])
    if not quick:
        _draw(lines)
    return {"lines": lines}


def _lines(space: Workspace, kind: str, quick: bool) -> list[dict[str, Any]]:
    """Return M for the samples of a kind of text, by replay, store and number of nodes."""
    shares, tokens = QUICK_SHARES if quick else SHARES, list[int]()
    files, lengths = _samples(space, kind, shares, quick), dict[tuple[str, str, int], list[float]]()
    for place, share in enumerate(shares):
        progress(f"{share:.1%} of {kind}")
        rest = space.work / "stores" / f"growth_{kind}_{share:g}"
        options = RestOptions(corpus=tuple(files[: place + 1]), name=rest.name)
        tokens.append(build_rest(options, space.tokenizer, rest).manifest.counts["tokens"])
        stores = {"REST": rest}
        for size in QUICK_MEGABYTES if quick else MEGABYTES:
            stores[f"CREST, {size} MB"] = crest = rest.with_name(f"{rest.name}_{size}MB")
            build_crest(CrestOptions(name=crest.name, max_bytes=size * 1_000_000), rest, crest)
        for (store, path), test, nodes in itertools.product(stores.items(), TESTS[kind], NODES):
            with closing(open_store(path)) as opened:
                recordings = REPLAYS[test].read(space, QUICK_ROWS if quick else ROWS)
                found = accepted_length(opened.drafter(opened.default_strategy), recordings, nodes)
                lengths.setdefault((test, store, nodes), []).append(found["accepted_length"])
    about = {"kind": kind, "tokens": tokens}
    return [
        {**about, "outputs": test, "store": store, "nodes": nodes, "M": found, **_fit(tokens, found)}
        for (test, store, nodes), found in lengths.items()
    ]


def _fit(tokens: Sequence[int], lengths: Sequence[float]) -> dict[str, float]:
    """Fit a line in log10(tokens) by least squares; return it, its mean error, and its value at 10^10 tokens."""
    slope, offset = np.polyfit(np.log10(tokens), lengths, 1)
    error = np.sqrt(np.mean((offset + slope * np.log10(tokens) - lengths) ** 2))
    far = offset + slope * np.log10(FAR)
    found = {"offset": offset, "slope": slope, "error": error, "far": far}
    return {name: round(float(value), 4) for name, value in found.items()}


def _samples(space: Workspace, kind: str, shares: Sequence[float], quick: bool) -> list[Path]:
    """Return a file for each share, with the documents not in smaller ones."""
    files = [space.work / "corpora" / f"growth-{kind}-{share:g}.jsonl" for share in shares]
    if not all(file.exists() for file in files):
        progress(f"texts of kind {kind}")
        parts: list[list[dict[str, str]]] = [[] for _ in shares]
        for document in _documents(space, kind, quick):
            digest = hashlib.sha256(document.text.encode("utf-8", "surrogatepass")).digest()
            part = int(np.searchsorted(shares, int.from_bytes(digest[:8]) / 2**64, side="right"))
            if part < len(parts):
                parts[part].append({"id": document.id, "text": document.text})
        for file, records in zip(files, parts, strict=True):
            write_records(file, records)
    return files


def _documents(space: Workspace, kind: str, quick: bool) -> Iterator[Document]:
    """Yield all documents of a kind."""
    if kind == "code":
        lines = (space.data / LARGE_LIST).read_text(encoding="utf-8").splitlines()
        yield from python_files(download_wheels(lines, space.work / "wheels-large"))
    else:
        names = CHAT.files if quick else [f"{name}.jsonl.zst" for name in CHAT_FILES]
        render = space.tokenizer.render_document
        files = find_files([space.data / "corpora" / name for name in names])
        yield from read_files(files, render=render, report=ReadReport())


def _draw(lines: Sequence[dict[str, Any]]) -> None:
    """Draw a panel for each replay with 64 nodes: the samples as points, and the fitted line, dashed."""
    fields = list(dict.fromkeys((line["kind"], line["outputs"]) for line in lines))
    figure = Figure(figsize=(3.6 * len(fields), 3.6), layout="constrained")
    for axes, (kind, test) in zip(figure.subplots(1, len(fields), squeeze=False)[0], fields, strict=True):
        axes.set(xlabel="tokens of stored text", title=f"{test}\nfrom {kind}", xscale="log")
        for line in lines:
            if (line["kind"], line["outputs"], line["nodes"]) == (kind, test, NODES[-1]):
                (drawn,) = axes.plot(line["tokens"], line["M"], "o", label=line["store"])
                far = np.geomspace(line["tokens"][0], FAR, 40)
                axes.plot(far, line["offset"] + line["slope"] * np.log10(far), "--", color=drawn.get_color())
        axes.legend(frameon=False, fontsize=8)
    save_svg(figure, PICTURE)
