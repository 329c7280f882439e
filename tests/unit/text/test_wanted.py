"""The wanted documents of a scan, against a slow and obvious oracle."""

from collections.abc import Sequence

import polars as pl
from hypothesis import given
from hypothesis import strategies as st

from draftstore.text.digests import stack_digests
from draftstore.text.scans import COLUMNS, Scan
from draftstore.text.wanted import Cap, Removal, removed_rows, wanted_digests
from tests.reference import plain_digest

Row = tuple[str, int, str, int, bool]
"""Text, source, id, first seen, refused."""


def scan_of(rows: Sequence[Row]) -> Scan:
    columns = {
        "digest": [plain_digest(row[0]) for row in rows],
        "id": [row[2] for row in rows],
        "characters": [len(row[0]) for row in rows],
        "bytes": [len(row[0]) for row in rows],
        "refused": [row[4] for row in rows],
        "source": [row[1] for row in rows],
        "file": [0] * len(rows),
        "first_seen": [row[3] for row in rows],
    }
    return Scan((), (), pl.DataFrame(columns, COLUMNS))


def oracle(
    rows: Sequence[Row],
    removals: Sequence[Removal],
    now: float,
    retention: dict[int, float],
    caps: dict[int, Cap],
) -> list[str]:
    gone = set()
    for removal in removals:
        digests = {bytes(digest) for digest in removal.digests}
        for text, source, name, seen, refused in rows:
            ruled = removal.source is not None or removal.before is not None
            ruled = ruled and removal.source in (None, source)
            ruled = ruled and (removal.before is None or seen < removal.before)
            if refused or plain_digest(text) in digests or name == removal.document or ruled:
                gone.add(text)
    gone |= {row[0] for row in rows if row[4]}
    wanted = []
    for number in sorted({row[1] for row in rows}):
        texts: dict[str, int] = {}
        for place, (text, source, _, seen, _) in enumerate(rows):
            alive = text not in gone and not (source in retention and seen <= now - retention[source])
            if source == number and alive:
                texts.setdefault(text, place)
        if number in caps:
            cap = caps[number]
            out_first = sorted(
                texts.items(),
                key=lambda item: (
                    (rows[item[1]][3], item[1]) if cap.first_out == "oldest" else (-len(item[0]), item[1])
                ),
            )
            while sum(len(text) for text, _ in out_first) > cap.bytes:
                out_first.pop(0)
            texts = dict(out_first)
        wanted += list(texts.items())
    first: dict[str, int] = {}
    for text, place in wanted:
        first[text] = min(place, first.get(text, place))
    return sorted(first, key=lambda text: first[text])


TEXTS = st.sampled_from(["a", "bb", "ccc", "dddd", "eeeee"])
SOURCES = st.integers(1, 3)


@given(data=st.data())
def test_wanted_is_what_the_oracle_says(data: st.DataObject) -> None:
    seen = {text: data.draw(st.integers(0, 9)) for text in ["a", "bb", "ccc", "dddd", "eeeee"]}
    drawn = data.draw(
        st.lists(st.tuples(TEXTS, SOURCES, st.sampled_from("xyz"), st.integers(0, 9)), max_size=12)
    )
    rows = [(text, source, name, seen[text], refused == 0) for text, source, name, refused in drawn]
    removals = data.draw(
        st.lists(
            st.builds(
                Removal,
                digests=st.lists(TEXTS.map(plain_digest), max_size=1).map(stack_digests),
                document=st.none() | st.sampled_from("xyz"),
                source=st.none() | SOURCES,
                before=st.none() | st.integers(0, 9),
            ),
            max_size=1,
        )
    )
    retention = data.draw(st.dictionaries(SOURCES, st.integers(1, 10).map(float), max_size=2))
    cap = st.builds(Cap, st.integers(0, 12), st.sampled_from(["oldest", "largest"]))
    caps = data.draw(st.dictionaries(SOURCES, cap, max_size=2))
    found = wanted_digests(scan_of(rows), removals, now=10, retention=retention, caps=caps)
    expected = oracle(rows, removals, 10, retention, caps)
    assert [bytes(digest) for digest in found] == [plain_digest(text) for text in expected]


def test_a_removed_text_is_out_wherever_it_lies() -> None:
    rows = [("a", 1, "x", 0, False), ("b", 1, "y", 0, False), ("a", 2, "z", 0, False)]
    assert removed_rows(scan_of(rows), [Removal(document="x")]).tolist() == [True, False, True]
