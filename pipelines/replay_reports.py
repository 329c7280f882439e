"""Reports of publishing for the pages of flow runs: why a release did not move, and what its recordings say.

Pictures are data URIs in Markdown: both of Prefect's pages show those, and no file has to be served.
"""

import base64
from collections.abc import Mapping, Sequence
from typing import Any

from pipelines.reports import Built
from schema.length_chart import xml_text

LIVE, NEW, LIMIT = "#9aa0a6", "#1f5f8b", "#b3261e"
"""Colours of the live build, of the new one, and of its limits."""
BAR, GAP, NAMES, WIDTH = 14, 16, 130, 260
"""Height of a bar, space between recordings, width of their names and of a panel, in pixels."""


def refusal_markdown(
    release: str, built: Built, refusals: Mapping[str, str], replays: Sequence[Mapping[str, Any]] = ()
) -> str:
    """Return the page of a publishing that was refused.

    Args:
        release: name of the release, which stays where it is.
        built: the refused build.
        refusals: reasons by check.
        replays: what both builds did with recordings: `schema.gates.replay_rows`.
    """
    rows = [f"| {check} | {reason.replace('|', '/')} |" for check, reason in refusals.items()]
    return "\n".join(
        [
            f"# Release `{release}` was not moved",
            "",
            f"Build {built.build_id} in `{built.path}` does not go live:",
            "",
            "| check | reason |",
            "|---|---|",
            *rows,
            "",
            f"If that is meant, publish it: `draftstore releases publish {release} {built.build_id} "
            f"--force {','.join(refusals)}`, or run the flow with `force`.",
            "",
            *_replays(replays),
        ]
    )


def replays_markdown(
    release: str,
    built: Built,
    replays: Sequence[Mapping[str, Any]],
    said: Sequence[str] = (),
    lengths: str = "",
) -> str:
    """Return the page of a publishing that replayed recordings.

    Args:
        release: name of the release, which has moved.
        built: its build.
        replays: what both builds did with recordings: `schema.gates.replay_rows`.
        said: sentences about its publishing.
        lengths: SVG picture of the accepted lengths so far; empty: none.
    """
    head = [
        f"# Release `{release}` points at build {built.build_id}",
        "",
        *(f"- {each}" for each in said),
        "",
    ]
    over_time = [_picture(lengths, "accepted length over time"), ""] if lengths else []
    return "\n".join([*head, *_replays(replays), *over_time])


def _replays(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return table and picture of replays as lines; none without replays."""
    if not rows:
        return []
    table = [
        f"| {row['recording']} | {row['as']} | {row['build']} | {row['accepted_length']:.3f} | {row['p99_us']:,.1f} "
        f"| {row['bytes']:,} |"
        for row in rows
    ]
    return [
        "| recording | | build | accepted length | p99 of a lookup, µs | bytes |",
        "|---|---|--:|--:|--:|--:|",
        *table,
        "",
        _picture(draw_replays(rows), "accepted length and p99 of the new build and the live one"),
        "",
    ]


def _picture(svg: str, what: str) -> str:
    """Return an SVG picture as Markdown."""
    return f"![{what}](data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()})"


def draw_replays(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return an SVG picture of replays: bars of accepted lengths and p99, with the limits of the new build."""
    panels = (
        ("accepted length M, at least the red line", "accepted_length", "least_length", "{:.3f}"),
        ("p99 of a lookup in µs, at most the red line", "p99_us", "most_us", "{:,.0f}"),
    )
    names = list(dict.fromkeys(row["recording"] for row in rows))
    tops = {name: 48 + place * (2 * BAR + GAP) for place, name in enumerate(names)}
    height = 48 + len(names) * (2 * BAR + GAP)
    width = NAMES + len(panels) * (WIDTH + 70)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
        'font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="8" y="16"><tspan fill="{NEW}">new build</tspan> <tspan fill="{LIVE}">live build</tspan></text>',
        *(f'<text x="8" y="{top + BAR}">{xml_text(name)}</text>' for name, top in tops.items()),
    ]
    for place, (title, figure, limit, form) in enumerate(panels):
        left = NAMES + place * (WIDTH + 70)
        longest = max(max(row[figure], row[limit] or 0.0) for row in rows) or 1.0
        parts.append(f'<text x="{left}" y="38">{title}</text>')
        for row in rows:
            top = tops[row["recording"]]
            y, color = (top, NEW) if row["as"] == "new" else (top + BAR, LIVE)
            size = WIDTH * row[figure] / longest
            parts.append(f'<rect x="{left}" y="{y}" width="{size:.1f}" height="{BAR - 2}" fill="{color}"/>')
            parts.append(f'<text x="{left + size + 4:.1f}" y="{y + 10}">{form.format(row[figure])}</text>')
            if row["as"] == "new" and row[limit] is not None:
                x = left + WIDTH * row[limit] / longest
                parts.append(
                    f'<path d="M{x:.1f} {top - 3}v{2 * BAR + 4}" stroke="{LIMIT}" stroke-width="1.5" fill="none"/>'
                )
    return "".join([*parts, "</svg>"])
