"""The wanted documents of a scan, against a slow and obvious oracle."""

from collections.abc import Sequence
from typing import Any

import polars as pl
from hypothesis import given
from hypothesis import strategies as st

from draftstore.text.digests import split_digests
from draftstore.text.scans import COLUMNS, Scan
from draftstore.text.wanted import Cap, Removal, removed_rows, wanted_digests
from tests.reference import identity_of

Row = tuple[str, int, str, int, bool]
"""Name of its content, source, id, first seen, refused."""

ASKED, ANSWERED = {"role": "user", "content": "a"}, {"role": "assistant", "content": "bb"}
CONTENTS: dict[str, Any] = {
    "a": "a",
    "bb": "bb",
    "a, then bb": "a\nbb",
    "blank": " ",
    "asked": [ASKED, ANSWERED],
    "other roles": [ANSWERED | {"content": "a"}, ASKED | {"content": "bb"}],
    "no more": [ASKED, ANSWERED, {"role": "user", "content": "ccc"}],
    "longer": [ASKED, ANSWERED, {"role": "user", "content": "ccc"}, {"role": "assistant", "content": ""}],
    "empty answer": [{"role": "assistant", "content": ""}, ASKED],
}
IDENTITIES = {name: identity_of(content) for name, content in CONTENTS.items()}
SIZES = {name: place + 1 for place, name in enumerate(CONTENTS)}


def scan_of(rows: Sequence[Row]) -> Scan:
    identities = [IDENTITIES[row[0]] for row in rows]
    columns = {
        "digest": [identity[0] for identity in identities],
        "text": [identity[1] for identity in identities],
        "answer": [identity[2] for identity in identities],
        "beginnings": [list(identity[3]) for identity in identities],
        "id": [row[2] for row in rows],
        "characters": [SIZES[row[0]] for row in rows],
        "bytes": [SIZES[row[0]] for row in rows],
        "refused": [row[4] for row in rows],
        "source": [row[1] for row in rows],
        "file": [0] * len(rows),
        "first_seen": [row[3] for row in rows],
    }
    return Scan((), (), pl.DataFrame(columns, COLUMNS))


def removed(rows: Sequence[Row], removals: Sequence[Removal]) -> set[str]:
    """Return the names of removed contents: same document, same text, or a beginning that is one of these."""
    gone = {digest for name, _, _, _, refused in rows if refused for digest in IDENTITIES[name][:2]}
    for removal in removals:
        gone |= set(split_digests(removal.digests))
        for name, source, identifier, seen, _ in rows:
            ruled = removal.source is not None or removal.before is not None
            ruled = ruled and removal.source in (None, source)
            ruled = ruled and (removal.before is None or seen < removal.before)
            if identifier == removal.document or ruled:
                gone |= set(IDENTITIES[name][:2])
    return {
        name
        for name, (document, text, _, beginnings) in IDENTITIES.items()
        if gone & ({document, text, *beginnings} - {None})
    }


def oracle(
    rows: Sequence[Row],
    removals: Sequence[Removal],
    now: float,
    retention: dict[int, float],
    caps: dict[int, Cap],
) -> list[str]:
    gone = removed(rows, removals)
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
                    (rows[item[1]][3], item[1]) if cap.first_out == "oldest" else (-SIZES[item[0]], item[1])
                ),
            )
            while sum(SIZES[text] for text, _ in out_first) > cap.bytes:
                out_first.pop(0)
            texts = dict(out_first)
        wanted += list(texts.items())
    first: dict[str, int] = {}
    for text, place in wanted:
        first[text] = min(place, first.get(text, place))
    return sorted(first, key=lambda text: first[text])


NAMES = st.sampled_from(list(CONTENTS))
SOURCES = st.integers(1, 3)
DIGESTS = st.sampled_from([digest for known in IDENTITIES.values() for digest in known[:2] if digest])


@given(data=st.data())
def test_wanted_documents_equal_those_of_the_oracle(data: st.DataObject) -> None:
    seen = {name: data.draw(st.integers(0, 9)) for name in CONTENTS}
    drawn = data.draw(
        st.lists(st.tuples(NAMES, SOURCES, st.sampled_from("xyz"), st.integers(0, 9)), max_size=12)
    )
    rows = [
        (name, source, identifier, seen[name], refused == 0) for name, source, identifier, refused in drawn
    ]
    removals = data.draw(
        st.lists(
            st.builds(
                Removal,
                digests=st.lists(DIGESTS, max_size=1).map(b"".join),
                document=st.none() | st.sampled_from("xyz"),
                source=st.none() | SOURCES,
                before=st.none() | st.integers(0, 9),
            ),
            max_size=2,
        )
    )
    gone = removed(rows, removals)
    assert removed_rows(scan_of(rows), removals).tolist() == [row[0] in gone for row in rows]
    retention = data.draw(st.dictionaries(SOURCES, st.integers(1, 10).map(float), max_size=2))
    cap = st.builds(Cap, st.integers(0, 12), st.sampled_from(["oldest", "largest"]))
    caps = data.draw(st.dictionaries(SOURCES, cap, max_size=2))
    found = wanted_digests(scan_of(rows), removals, now=10, retention=retention, caps=caps)
    expected = oracle(rows, removals, 10, retention, caps)
    assert [bytes(digest) for digest in found] == [IDENTITIES[name][0] for name in expected]
