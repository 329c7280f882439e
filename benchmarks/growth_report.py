"""What `benchmarks.growth` prints, and the laws it fits."""

from collections.abc import Sequence
from typing import Any

from benchmarks.growth_law import fit_laws
from benchmarks.report import show_table


def fit(measured: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Fit the laws to the nested samples, for each kind of text, replay, store and number of nodes."""
    laws = []
    for kind in dict.fromkeys(each["kind"] for each in measured if each["nested"]):
        points = [each for each in measured if each["kind"] == kind and each["nested"]]
        for store, replay, nodes in _lines(points):
            lengths = [each["accepted_length"][store][replay][nodes] for each in points]
            place = {"kind": kind, "store": store, "replay": replay, "nodes": int(nodes)}
            laws.append(place | fit_laws([each["tokens"] for each in points], lengths))
    return laws


def _show_builds(measured: Sequence[dict[str, Any]]) -> None:
    """Print what builds and lookups cost."""
    rows = []
    for each in measured:
        build, lookup = each["rest"], each["lookup"]
        rows.append([
            each["name"], each["tokens"], build["segments"], *_costs(build), build["bytes_per_token"],
            lookup["open_ms"], *(lookup["backoff"]["query_us"][key] for key in ("p50", "p99")),
            *_cold(each["cold"]), *_costs(each.get("crest_50")),
        ])  # fmt: skip
    costs = ["min", "CPU min", "own GB", "and mapped"]
    columns = [
        "store",
        "tokens",
        "segments",
        *costs,
        "B/token",
        "open ms",
        "p50 µs",
        "p99 µs",
        "pages",
        *costs,
    ]
    title = "builds on all cores of a shared machine, then of CREST in 50 MB; memory: peak over all processes"
    show_table(title, columns, rows)


def _costs(build: dict[str, Any] | None) -> list[float | str]:
    """Return minutes, minutes of the processors, and the peaks of memory of a build."""
    if build is None:
        return [""] * 4
    minutes = [build["build_seconds"] / 60, build["cpu_seconds"] / 60]
    return [*minutes, build["peak_anonymous"] / 1e9, build["peak_resident"] / 1e9]


def _cold(cold: dict[str, Any] | None) -> list[float | str]:
    """Return the megabytes that a draft reads if nothing is in memory, and its milliseconds."""
    return [cold["bytes"]["p50"] / 1e6, cold["us"]["p50"] / 1e3] if cold else ["", ""]


def _lines(points: Sequence[dict[str, Any]]) -> list[tuple[str, str, str]]:
    """Return the stores, replays and nodes of all points."""
    lengths = points[0]["accepted_length"]
    shared = [store for store in lengths if all(store in each["accepted_length"] for each in points)]
    return [
        (store, replay, n) for store in shared for replay in lengths[store] for n in lengths[store][replay]
    ]


def show(measured: Sequence[dict[str, Any]], laws: Sequence[dict[str, Any]]) -> None:
    """Print what was measured, and the laws."""
    _show_builds(measured)
    for kind in dict.fromkeys(each["kind"] for each in measured):
        own = [each for each in measured if each["kind"] == kind]
        rows = [
            [
                f"{replay}: {store}, {nodes} nodes",
                *(each["accepted_length"][store][replay][nodes] for each in own),
            ]
            for store, replay, nodes in _lines(own)
        ]
        show_table(f"accepted length by tokens, {kind}", ["", *(f"{each['tokens']:,}" for each in own)], rows)
    columns = [
        "",
        "a power of ten adds",
        "rms: logarithm",
        "power",
        "largest, from the others",
        "power",
        "was",
    ]
    rows = [
        [
            f"{law['replay']}: {law['store']}, {law['nodes']}", law["law"]["slope"], *law["rms"].values(),
            *law["held_out"].values(), *law["far"],
        ]
        for law in laws
    ]  # fmt: skip
    show_table(
        "M = a + b log10(tokens), and M = 1 + c tokens^k",
        [*columns, "at 10^10: least", "likely", "most"],
        rows,
    )
