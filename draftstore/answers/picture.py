"""The picture of a forecast: accepted lengths with their intervals, as SVG written by hand, which needs no package."""

from html import escape
from itertools import groupby
from operator import attrgetter
from pathlib import Path

from draftstore.answers.gain import Gain, Row
from draftstore.storage.files import replacing

COLOURS = ("#6a4c93", "#3f9b7f", "#1f5f8b", "#0f7b5f")
LEFT, WIDTH, RIGHT, LINE = 190, 420, 110, 20


def draw_gain(path: Path, gain: Gain) -> None:
    """Write a bar for each row of a forecast, from M = 1, with a line for its interval; atomically."""
    most = max(max(row.interval[1], row.length) for row in gain.rows)
    scale = WIDTH / max(most - 1, 0.1)
    parts, y = list[str](), 10
    for shape, rows in groupby(gain.rows, attrgetter("drafts")):
        y += LINE
        parts.append(f'<text x="{LEFT}" y="{y}" font-weight="bold">{escape(shape)}: tokens a pass</text>')
        for row, colour in zip(rows, COLOURS, strict=True):
            y += LINE
            parts.append(_bar(row, colour, y, scale))
        y += LINE // 2
    size = f'width="{LEFT + WIDTH + RIGHT}" height="{y + LINE}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="13">'
    background = '<rect width="100%" height="100%" fill="white"/>'
    with replacing(path) as file:
        file.write_text("\n".join([head, background, *parts, "</svg>\n"]))


def _bar(row: Row, colour: str, y: int, scale: float) -> str:
    end, low, high = (LEFT + scale * max(value - 1, 0) for value in (row.length, *row.interval))
    middle = y - 4
    return (
        f'<text x="{LEFT - 8}" y="{y}" text-anchor="end">{escape(row.sources)}</text>'
        f'<rect x="{LEFT}" y="{y - 12}" width="{end - LEFT:.1f}" height="15" fill="{colour}"/>'
        f'<line x1="{low:.1f}" x2="{high:.1f}" y1="{middle}" y2="{middle}" stroke="black"/>'
        f'<text x="{max(end, high) + 6:.1f}" y="{y}">{row.length:.2f}</text>'
    )
