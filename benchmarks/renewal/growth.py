"""Accepted length by tokens of text: nested samples of documents, which differ in size alone.

A document falls into a sample by the hash of its text, so that each has its share of every file; the next one holds all
of it, and more. A line of log10(tokens) is fitted to the samples.
"""

import hashlib
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from benchmarks.common import (
    CHAT,
    Workspace,
    accepted_length,
    download_wheels,
    evenly,
    python_files,
    write_records,
)
from benchmarks.measure import progress
from benchmarks.quality.replays import REPLAYS
from benchmarks.report import save_svg, show_table
from draftstore.storage.report import ReadReport
from draftstore.stores.crest.build import CrestOptions, build_crest
from draftstore.stores.registry import open_store
from draftstore.stores.rest.build import RestOptions, build_rest
from draftstore.text.corpus import read_corpus
from draftstore.text.records import Document

CHAT_FILES = (
    "chat_atlas", "chat_instruct_mix", "chat_sharegpt", "code_instruct", "llm_arena_hard", "llm_flask",
    "llm_oasst_reports", "llm_reasoning", "llm_wildbench",
)  # fmt: skip
LARGE_LIST = "code_packages_large.txt"
SHARES, QUICK_SHARES = (0.01, 0.03, 0.1, 0.3, 1.0), (0.003, 0.01, 0.03)
MEGABYTES = (10, 50)
NODES = (16, 64)
ROWS, QUICK_ROWS = 100, 4
FAR = 1e10
PICTURE = Path("docs/growth.svg")
ALPACA, HUMANEVAL = "AlpacaEval: Vicuna-7B-v1.5", "HumanEval: CodeLlama-7b-Instruct"
TESTS = {"chat": (ALPACA, HUMANEVAL), "code": (HUMANEVAL,)}
"""Recorded outputs by kind of text."""


def measure_growth(space: Workspace, kinds: Sequence[str], *, quick: bool) -> dict[str, Any]:
    """Measure all samples, fit the laws, print the tables, and draw the picture unless it is quick."""
    points = [point for kind in kinds for point in _points(space, kind, quick)]
    laws = _fit(points)
    for kind in kinds:
        own = [each for each in points if each["kind"] == kind]
        names = list(own[0]["accepted_length"])
        show_table(
            f"M by tokens of {kind}", ["", *(f"{each['tokens']:,}" for each in own)],
            [[name, *(each["accepted_length"][name] for each in own)] for name in names],
        )  # fmt: skip
    show_table(
        "M = offset + slope * log10(tokens)", ["", "slope", "mean error", "at 10^10"],
        [[f"{law['kind']}, {law['name']}", law["slope"], law["error"], law["far"]] for law in laws],
    )  # fmt: skip
    if not quick:
        _draw(points, laws)
    return {"points": points, "laws": laws}


def _points(space: Workspace, kind: str, quick: bool) -> Iterator[dict[str, Any]]:
    """Yield the figures of the samples of a kind of text, the smallest first."""
    shares = QUICK_SHARES if quick else SHARES
    files = _samples(space, kind, shares, quick)
    for place, share in enumerate(shares):
        progress(f"{share:.1%} of {kind}")
        rest = space.work / "stores" / f"growth_{kind}_{share:g}"
        begin = perf_counter()
        options = RestOptions(corpus=tuple(files[: place + 1]), name=rest.name)
        manifest = build_rest(options, space.tokenizer, rest).manifest
        seconds = round(perf_counter() - begin, 1)
        stores = {"REST": rest}
        for size in MEGABYTES:
            stores[f"CREST, {size} MB"] = crest = rest.with_name(f"{rest.name}_{size}MB")
            build_crest(CrestOptions(crest.name, max_bytes=size * 1_000_000), rest, crest)
        lengths = {}
        for store, path in stores.items():
            opened = open_store(path)
            for test in TESTS[kind]:
                recordings = evenly(REPLAYS[test].read(space), QUICK_ROWS if quick else ROWS)
                for nodes in NODES:
                    found = accepted_length(opened.drafter(), recordings, nodes)
                    lengths[f"{test}, {store}, {nodes} nodes"] = found["accepted_length"]
            opened.close()
        tokens = manifest.counts["tokens"]
        yield {
            "kind": kind,
            "tokens": tokens,
            "build_seconds": seconds,
            "bytes_a_token": round(manifest.size / tokens, 2),
            "accepted_length": lengths,
        }


def _samples(space: Workspace, kind: str, shares: Sequence[float], quick: bool) -> list[Path]:
    """Return a file for each share, with what the smaller ones lack."""
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
        yield from python_files(sorted(download_wheels(lines, space.work / "wheels-large").glob("*.whl")))
    else:
        names = CHAT.files if quick else [f"{name}.jsonl.zst" for name in CHAT_FILES]
        render = partial(space.tokenizer.render_chat, add_generation_prompt=False)
        yield from read_corpus(
            [space.data / "corpora" / name for name in names], render=render, report=ReadReport()
        )


def _fit(points: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Fit a line of log10(tokens) to each kind, replay, store and number of nodes, by least squares."""
    laws = []
    for kind in dict.fromkeys(each["kind"] for each in points):
        own = [each for each in points if each["kind"] == kind]
        x = np.log10([each["tokens"] for each in own])
        for name in own[0]["accepted_length"]:
            y = np.array([each["accepted_length"][name] for each in own])
            slope, offset = np.polyfit(x, y, 1)
            error = float(np.sqrt(np.mean((offset + slope * x - y) ** 2)))
            far = float(offset + slope * np.log10(FAR))
            laws.append(
                {"kind": kind, "name": name, "offset": round(float(offset), 4), "slope": round(float(slope), 4),
                 "error": round(error, 4), "far": round(far, 2)}
            )  # fmt: skip
    return laws


def _draw(points: Sequence[dict[str, Any]], laws: Sequence[dict[str, Any]]) -> None:
    """Draw a field for each replay with 64 nodes: points of samples, and the line through them, dashed beyond."""
    fields = [(kind, test) for kind in dict.fromkeys(each["kind"] for each in points) for test in TESTS[kind]]
    figure = Figure(figsize=(3.6 * len(fields), 3.6), layout="constrained")
    for axes, (kind, test) in zip(
        figure.subplots(1, len(fields), sharey=True, squeeze=False)[0], fields, strict=True
    ):
        axes.set(xlabel="tokens of stored text", title=f"{test}\nfrom {kind}", xscale="log")
        own = [each for each in points if each["kind"] == kind]
        x = np.array([each["tokens"] for each in own], float)
        far = np.geomspace(x[0], FAR, 40)
        for law in laws:
            if (
                law["kind"] == kind
                and law["name"].startswith(test)
                and law["name"].endswith(f"{NODES[-1]} nodes")
            ):
                label = law["name"].removeprefix(f"{test}, ").removesuffix(f", {NODES[-1]} nodes")
                (line,) = axes.plot(
                    x, [each["accepted_length"][law["name"]] for each in own], "o", label=label
                )
                axes.plot(far, law["offset"] + law["slope"] * np.log10(far), "--", color=line.get_color())
        axes.legend(frameon=False, fontsize=8)
    save_svg(figure, PICTURE)
