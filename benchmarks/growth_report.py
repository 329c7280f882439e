"""What `benchmarks.growth` prints, and the laws it fits."""

from collections.abc import Sequence
from typing import Any

from benchmarks.growth_law import fit_laws
from benchmarks.report import show_table

LEAST = 3
"""Samples that a law is fitted to, at least."""


def fit(measured: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Fit the laws to the nested samples, for each kind of text, replay, store and number of nodes."""
    laws = []
    for kind in dict.fromkeys(each["kind"] for each in measured):
        nested = [each for each in measured if each["kind"] == kind and each["nested"]]
        for store, replay, nodes in _lines(nested):
            points = [each for each in nested if store in each["accepted_length"]]
            if len(points) < LEAST:
                continue
            lengths = [each["accepted_length"][store][replay][nodes] for each in points]
            place = {"kind": kind, "store": store, "replay": replay, "nodes": int(nodes)}
            laws.append(place | fit_laws([each["tokens"] for each in points], lengths))
    return laws


def _lines(points: Sequence[dict[str, Any]]) -> list[tuple[str, str, str]]:
    """Return the stores, replays and nodes of any of some points, each once."""
    found = [
        (store, replay, nodes)
        for each in points
        for store, replays in each["accepted_length"].items()
        for replay, lengths in replays.items()
        for nodes in lengths
    ]
    return list(dict.fromkeys(found))


def show(measured: Sequence[dict[str, Any]], laws: Sequence[dict[str, Any]]) -> None:
    """Print what was measured, and the laws."""
    _show_builds(measured)
    for kind in dict.fromkeys(each["kind"] for each in measured):
        own = [each for each in measured if each["kind"] == kind]
        rows = [
            [f"{replay}: {store}, {nodes}"]
            + [each["accepted_length"].get(store, {}).get(replay, {}).get(nodes, "") for each in own]
            for store, replay, nodes in _lines(own)
        ]
        show_table(f"accepted length by tokens, {kind}", ["", *(f"{each['tokens']:,}" for each in own)], rows)
    columns = [
        "",
        "a power of ten adds",
        "rms: log",
        "power",
        "of the largest, from others: log",
        "power",
        "was",
    ]
    rows = [
        [
            f"{law['replay']}: {law['store']}, {law['nodes']}", law["law"]["slope"], *law["rms"].values(),
            *law.get("held_out", dict.fromkeys("abc", "")).values(), *law["far"],
        ]
        for law in laws
    ]  # fmt: skip
    title = "M = a + b log10(tokens), and M = 1 + c tokens^k"
    show_table(title, [*columns, "at 10^10: least", "likely", "most"], rows)


def _show_builds(measured: Sequence[dict[str, Any]]) -> None:
    """Print what builds and lookups cost."""
    costs = ["min", "CPU min", "own GB", "and mapped"]
    rest, crest = [], []
    for each in measured:
        build, lookup = each["rest"], each["lookup"]
        times = lookup["backoff"]["query_us"] if lookup else {}
        rest.append([
            each["name"], each["tokens"], build["segments"], *_costs(build), build["bytes_per_token"],
            lookup["open_ms"] if lookup else "", *(times.get(key, "") for key in ("p50", "p99")),
            *_cold(each["cold"]),
        ])  # fmt: skip
        sizes = {name.removeprefix("crest_"): each[name] for name in each if name.startswith("crest_")}
        crest += [
            [f"{each['name']}, {size} MB", each["tokens"], *_costs(distilled)]
            for size, distilled in sizes.items()
            if distilled
        ]
    columns = ["tokens", "segments", *costs, "B/token", "open ms", "p50 µs", "p99 µs", "cold MB", "cold ms"]
    title = "REST stores, on all cores of a shared machine; memory: peak over all processes"
    show_table(title, ["store", *columns], rest)
    show_table("CREST stores distilled from them", ["store", "tokens", *costs], crest)


def _costs(build: dict[str, Any]) -> list[float]:
    """Return minutes, minutes of the processors, and the peaks of memory of a build."""
    minutes = [build["build_seconds"] / 60, build["cpu_seconds"] / 60]
    return [*minutes, build["peak_anonymous"] / 1e9, build["peak_resident"] / 1e9]


def _cold(cold: dict[str, Any] | None) -> list[float | str]:
    """Return the megabytes that a draft reads if nothing is in memory, and its milliseconds."""
    return [cold["bytes"]["p50"] / 1e6, cold["us"]["p50"] / 1e3] if cold else ["", ""]
