"""Accepted length over time as an SVG picture: a line for each recording that a release was replayed on.

A dot is a move of the release, hollow where it was taken back to an older build. Dots lie where they fall in time.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from itertools import cycle
from typing import NamedTuple

from sqlalchemy.orm import Session

from schema.releases import release_history

COLORS = ("#1f5f8b", "#0f7b5f", "#b3261e", "#8a5a00", "#6a4c93", "#5f6368")
WIDTH, HEIGHT = 640, 260
"""Size of the axes, in pixels."""
LEFT, TOP, NAMES = 56, 34, 220
"""Room for numbers, for the title and for the names of recordings, in pixels."""
LINE = 14
"""Least distance of two names, in pixels."""
STEPS = 4
"""Parts of each axis between labels."""


class Move(NamedTuple):
    """A move of a release.

    Attributes:
        at: when.
        back: whether it was a rollback.
        lengths: accepted length by recording.
    """

    at: datetime
    back: bool
    lengths: Mapping[str, float]


def moves_of(session: Session, release: str) -> list[Move]:
    """Return every move of a release.

    Raises:
        CatalogueError: no such release.
    """
    return [
        Move(move.moved_at, move.action == "rollback", move.lengths)
        for move in release_history(session, release)
    ]


class _Axes(NamedTuple):
    """The shown range of times, in seconds, and of accepted lengths."""

    first: float
    last: float
    low: float
    high: float

    def x(self, seconds: float) -> float:
        """Return where a time lies, in pixels."""
        share = (seconds - self.first) / (self.last - self.first) if self.last > self.first else 0.5
        return LEFT + WIDTH * share

    def y(self, length: float) -> float:
        """Return where an accepted length lies, in pixels."""
        return TOP + HEIGHT * (self.high - length) / (self.high - self.low)


def draw_lengths(release: str, moves: Iterable[Move]) -> str:
    """Return an SVG picture of the accepted lengths of a release.

    Args:
        release: name of the release.
        moves: its moves, in any order; those without a length are left out.
    """
    moves = sorted((move for move in moves if move.lengths), key=lambda move: move.at)
    times = [move.at.timestamp() for move in moves] or [0.0]
    lengths = [length for move in moves for length in move.lengths.values()] or [1.0, 2.0]
    room = max(max(lengths) - min(lengths), 0.02) / 10
    bottom = max(TOP + HEIGHT, TOP + LINE * (len({name for move in moves for name in move.lengths}) - 1))
    axes = _Axes(times[0], times[-1], min(lengths) - room, max(lengths) + room)
    lines: dict[str, list[Move]] = {}
    for move in moves:
        for recording in move.lengths:
            lines.setdefault(recording, []).append(move)
    ends = _apart([axes.y(line[-1].lengths[recording]) for recording, line in lines.items()], bottom)
    drawn = zip(lines.items(), ends, cycle(COLORS), strict=False)
    width, height = LEFT + WIDTH + NAMES, bottom + 30
    return "".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            'font-family="sans-serif" font-size="11"><rect width="100%" height="100%" fill="white"/>',
            f'<text x="{LEFT}" y="18" font-size="13">accepted length M of {xml_text(release)}, '
            f"{'as replayed when it moved' if moves else 'which was never replayed'}</text>",
            *_draw_axes(axes),
            *(_draw_line(axes, recording, line, end, color) for (recording, line), end, color in drawn),
            "</svg>\n",
        ]
    )


def xml_text(text: str) -> str:
    """Return text as XML, which knows no control characters and no halves of characters."""
    return escape("".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text))


def _draw_axes(axes: _Axes) -> Iterator[str]:
    """Yield the lines of equal length, and labels of both axes; no times if there is none."""
    span = axes.last - axes.first
    for step in range(STEPS + 1):
        length = axes.low + (axes.high - axes.low) * step / STEPS
        yield (
            f'<path d="M{LEFT} {axes.y(length):.1f}h{WIDTH}" stroke="#e3e5e8"/>'
            f'<text x="{LEFT - 6}" y="{axes.y(length) + 4:.1f}" text-anchor="end">{length:.2f}</text>'
        )
    for step in range(STEPS + 1 if span else int(axes.first > 0)):
        moment = axes.first + span * step / STEPS
        yield (
            f'<text x="{axes.x(moment):.1f}" y="{TOP + HEIGHT + 18}" text-anchor="middle">{_moment(moment, span)}'
            "</text>"
        )


def _draw_line(axes: _Axes, recording: str, line: Sequence[Move], end: float, color: str) -> str:
    """Return the line of a recording, with its name at a height."""
    points = [(axes.x(move.at.timestamp()), axes.y(move.lengths[recording])) for move in line]
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    dots = [
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{"white" if move.back else color}" stroke="{color}"/>'
        for (x, y), move in zip(points, line, strict=True)
    ]
    return (
        f'<path d="M{path}" stroke="{color}" stroke-width="1.5" fill="none"/>{"".join(dots)}'
        f'<text x="{LEFT + WIDTH + 10}" y="{end + 4:.1f}" fill="{color}">{xml_text(recording)} '
        f"{line[-1].lengths[recording]:.3f}</text>"
    )


def _moment(seconds: float, span: float) -> str:
    """Return a time as short as it stays clear over a span of so many seconds."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d" if span > 4 * 86_400 else "%m-%d %H:%M")


def _apart(heights: Sequence[float], bottom: float) -> list[float]:
    """Return where names stand beside the ends of their lines, none upon another and none below the bottom."""
    places, free = [0.0] * len(heights), float("-inf")
    order = sorted(range(len(heights)), key=lambda number: heights[number])
    for number in order:
        places[number] = free = max(heights[number], free + LINE)
    for number in reversed(order):
        places[number] = bottom = min(places[number], bottom)
        bottom -= LINE
    return places
