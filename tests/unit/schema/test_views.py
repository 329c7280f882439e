"""The views, against plain Python over small random n-grams and trees."""

import random
from collections import Counter
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

from schema import catalogue, views
from schema.db.partitions import attach_partition, create_partition
from schema.models import Build
from tests.fakes.databases import publish, write_store

HEAD = 30
Ngram = tuple[int, ...]


@dataclass
class Kept:
    """An entry of a CREST store, as it was selected."""

    tokens: Ngram
    count: int
    nodes: int
    raw_bytes: int
    bytes: int
    tree: str | None

    @property
    def n(self) -> int:
        return len(self.tokens)


def words(tokens: Ngram) -> str:
    return " ".join(f"w{token}" for token in tokens)


def ask(session: Session, query: str, **values: Any) -> list[Any]:
    rows = session.execute(text(query), values)
    return [tuple(float(value) if isinstance(value, Decimal) else value for value in row) for row in rows]


def fill(session: Session, table: str, build_id: int, rows: list[dict[str, Any]]) -> None:
    """Make a partition and fill it."""
    session.execute(text(create_partition(table, build_id)))
    for row in rows:
        columns = ", ".join(row)
        session.execute(text(f"INSERT INTO {table}_{build_id} ({columns}) VALUES (:{', :'.join(row)})"), row)
    for statement in attach_partition(table, build_id):
        session.execute(text(statement))


@pytest.fixture
def counts() -> dict[int, Counter[Ngram]]:
    """Return the n-grams of random tokens, by n, common and rare ones."""
    dice = random.Random(1)
    tokens = [int(dice.expovariate(0.4)) for _ in range(600)]
    return {n: Counter(tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)) for n in (1, 2, 3)}


@pytest.fixture
def counted(session: Session, tmp_path: Path, counts: dict[int, Counter[Ngram]]) -> Build:
    """Return a build of kind ngrams with its head and its spectrum, and another one beside it."""
    for name in ("counts", "other"):
        build = catalogue.add_build(session, write_store(tmp_path / name, kind="ngrams", name=name))
        for n, of_n in counts.items():
            if name == "other":
                of_n = Counter(dict.fromkeys(of_n, 5))
            for count, ngrams in Counter(of_n.values()).items():
                row = {"build_id": build.id, "n": n, "count": count, "ngrams": ngrams}
                insert = "INSERT INTO ngram_spectrum VALUES (:build_id, :n, :count, :ngrams)"
                session.execute(text(insert), row)
        head = [
            {
                "build_id": build.id,
                "n": n,
                "rank": rank,
                "tokens": list(ngram),
                "text": words(ngram),
                "count": count,
            }
            for n, of_n in counts.items()
            for rank, (ngram, count) in enumerate(of_n.most_common(HEAD), 1)
        ]
        fill(session, "ngrams", build.id, head)
    return catalogue.list_builds(session)[1]


def kept_build(
    session: Session, folder: Path, counts: dict[int, Counter[Ngram]], seed: int
) -> tuple[Build, list[Kept]]:
    """Return a CREST build that kept some of the n-grams, and what it kept, in order."""
    dice = random.Random(seed)
    common = sorted(((n, item) for n in (1, 2) for item in counts[n].most_common(12)), key=lambda x: -x[1][1])
    kept = [
        Kept(
            ngram,
            count,
            nodes := dice.randint(1, 64),
            10 * nodes,
            dice.randint(5, 90),
            "tree" if rank < 4 else None,
        )
        for rank, (_, (ngram, count)) in enumerate(common)
        if dice.random() < 0.7
    ]
    build = catalogue.add_build(session, write_store(folder, kind="crest", name=folder.name))
    rows = [
        {
            "build_id": build.id,
            "rank": rank,
            "n": entry.n,
            "tokens": list(entry.tokens),
            "text": words(entry.tokens),
        }
        | {"count": entry.count, "nodes": entry.nodes, "raw_bytes": entry.raw_bytes, "bytes": entry.bytes}
        | {"tree": entry.tree}
        for rank, entry in enumerate(kept, 1)
    ]
    fill(session, "kept_ngrams", build.id, rows)
    return build, kept


class TestNgrams:
    def test_totals(self, session: Session, counted: Build, counts: dict[int, Counter[Ngram]]) -> None:
        query = "SELECT n, distinct_ngrams, total, once, highest_count, mean_count FROM ngram_totals"
        found = ask(session, f"{query} WHERE build_id = :id ORDER BY n", id=counted.id)
        for (n, *figures, mean), of_n in zip(found, counts.values(), strict=True):
            once = sum(count == 1 for count in of_n.values())
            assert figures == [len(of_n), of_n.total(), once, max(of_n.values())], n
            assert float(mean) == pytest.approx(of_n.total() / len(of_n), abs=0.006)

    def test_the_most_common(
        self, session: Session, counted: Build, counts: dict[int, Counter[Ngram]]
    ) -> None:
        query = "SELECT rank, text, count, share, tokens FROM top_ngrams WHERE build_id = :id AND n = :n ORDER BY rank"
        for n, of_n in counts.items():
            expected = [
                (rank, words(ngram), count, pytest.approx(count / of_n.total(), abs=1e-8), list(ngram))
                for rank, (ngram, count) in enumerate(of_n.most_common(HEAD), 1)
            ]
            assert ask(session, query, id=counted.id, n=n) == expected

    def test_the_curve(self, session: Session, counted: Build, counts: dict[int, Counter[Ngram]]) -> None:
        query = "SELECT top, least_count, occurrences, share FROM ngram_curve"
        query += " WHERE build_id = :id AND n = :n ORDER BY top"
        for n, of_n in counts.items():
            ordered = sorted(of_n.values(), reverse=True)
            rows = ask(session, query, id=counted.id, n=n)
            assert [row[1] for row in rows] == sorted(set(ordered), reverse=True)
            for top, least, occurrences, share in rows:
                assert (min(ordered[:top]), sum(ordered[:top])) == (least, occurrences)
                assert float(share) == pytest.approx(occurrences / of_n.total(), abs=1e-8)
            assert rows[-1][0] == len(of_n)
            assert rows[-1][3] == 1.0

    def test_the_share_of_any_number(
        self, session: Session, counted: Build, counts: dict[int, Counter[Ngram]]
    ) -> None:
        for n, of_n in counts.items():
            ordered = sorted(of_n.values(), reverse=True)
            numbers = list(range(len(of_n) + 3))
            query = "SELECT top, ngram_share(:id, :n, top) FROM unnest(CAST(:numbers AS bigint[])) top"
            for top, share in ask(session, query, id=counted.id, n=n, numbers=numbers):
                assert float(share) == pytest.approx(
                    float(Fraction(sum(ordered[:top]), of_n.total())), abs=1e-8
                ), (n, top)

    def test_a_build_without_counts_has_no_share(self, session: Session) -> None:
        assert ask(session, "SELECT ngram_share(12345, 1, 10)") == [(None,)]


class TestTrees:
    def test_sizes_and_bytes(
        self, session: Session, tmp_path: Path, counts: dict[int, Counter[Ngram]]
    ) -> None:
        build, kept = kept_build(session, tmp_path / "a", counts, 1)
        kept_build(session, tmp_path / "b", counts, 2)
        sizes = "SELECT n, entries, mean_nodes, least_nodes, most_nodes, nodes FROM tree_sizes"
        taken = (
            "SELECT n, entries, raw_bytes, bytes, raw_bytes_per_entry, bytes_per_entry, ratio FROM bytes_by_n"
        )
        for n, *found in ask(session, f"{sizes} WHERE build_id = :id", id=build.id):
            nodes = [entry.nodes for entry in kept if entry.n == n]
            assert found == [
                len(nodes), pytest.approx(fmean(nodes), abs=0.006), min(nodes), max(nodes), sum(nodes)
            ]  # fmt: skip
        for n, *found in ask(session, f"{taken} WHERE build_id = :id", id=build.id):
            raw = [entry.raw_bytes for entry in kept if entry.n == n]
            stored = [entry.bytes for entry in kept if entry.n == n]
            assert found[:3] == [len(raw), sum(raw), sum(stored)]
            assert [float(value) for value in found[3:]] == pytest.approx(
                [fmean(raw), fmean(stored), sum(raw) / sum(stored)], abs=0.06
            )

    def test_texts(self, session: Session, tmp_path: Path, counts: dict[int, Counter[Ngram]]) -> None:
        build, kept = kept_build(session, tmp_path / "a", counts, 1)
        found = ask(
            session, "SELECT rank, text, nodes, tree FROM tree_texts WHERE build_id = :id", id=build.id
        )
        expected = [
            (rank, words(entry.tokens), entry.nodes, entry.tree)
            for rank, entry in enumerate(kept, 1)
            if entry.tree
        ]
        assert sorted(found) == expected
        assert expected

    def test_coverage(
        self, session: Session, tmp_path: Path, counted: Build, counts: dict[int, Counter[Ngram]]
    ) -> None:
        catalogue.drop_build(
            session, catalogue.list_builds(session)[0].id
        )  # the newest counts would be taken
        build, kept = kept_build(session, tmp_path / "a", counts, 1)
        query = "SELECT n, kept, distinct_ngrams, occurrences, total, share FROM kept_coverage WHERE build_id = :id"
        for n, *found in ask(session, query, id=build.id):
            of_n = [entry.count for entry in kept if entry.n == n]
            total = counts[n].total()
            assert found == [
                len(of_n),
                len(counts[n]),
                sum(of_n),
                total,
                pytest.approx(sum(of_n) / total, abs=1e-8),
            ]

    def test_two_builds_compared(
        self, session: Session, tmp_path: Path, counts: dict[int, Counter[Ngram]]
    ) -> None:
        (a, in_a), (b, in_b) = (kept_build(session, tmp_path / str(seed), counts, seed) for seed in (1, 2))
        found = ask(session, "SELECT * FROM compare_builds(:a, :b)", a=a.id, b=b.id)
        assert [row[0] for row in found] == [1, 2, None]
        for n, *figures in found:
            one = {entry.tokens: entry for entry in in_a if n in (None, entry.n)}
            other = {entry.tokens: entry for entry in in_b if n in (None, entry.n)}
            assert figures == [
                len(one.keys() & other.keys()), len(one.keys() - other.keys()), len(other.keys() - one.keys()),
                sum(entry.bytes for entry in one.values()), sum(entry.bytes for entry in other.values()),
                pytest.approx(fmean(entry.nodes for entry in one.values()), abs=0.006),
                pytest.approx(fmean(entry.nodes for entry in other.values()), abs=0.006),
            ]  # fmt: skip
        only = ask(session, "SELECT tokens FROM kept_only_by(:a, :b) ORDER BY rank", a=a.id, b=b.id)
        assert [tuple(row[0]) for row in only] == [
            entry.tokens for entry in in_a if entry.tokens not in {entry.tokens for entry in in_b}
        ]


def test_live_releases(session: Session, tmp_path: Path) -> None:
    builds = [
        catalogue.add_build(session, write_store(tmp_path / str(i), name=f"store {i}")) for i in range(2)
    ]
    none = catalogue.add_build(session, write_store(tmp_path / "recycling", kind="recycling", corpus=None))
    for name, build in (("chat", builds[0]), ("chat", builds[1]), ("fast", none)):
        publish(session, name, build.id)
    query = "SELECT release, build_id, kind, build, corpus, documents, tokens, bytes, path FROM live_releases"
    assert ask(session, f"{query} ORDER BY release") == [
        ("chat", builds[1].id, "rest", "store 1", "texts.jsonl", 2, 10, 3, builds[1].path),
        ("fast", none.id, "recycling", "small", None, None, None, 3, none.path),
    ]
    assert ask(session, "SELECT live_build('chat'), live_build('other')") == [(builds[1].id, None)]


def test_every_view_and_column_is_described(session: Session) -> None:
    for view in views.VIEWS:
        catalog = "pg_class" if isinstance(view, views.View) else "pg_proc"
        name = "relname" if isinstance(view, views.View) else "proname"
        query = f"SELECT obj_description(oid, '{catalog}') FROM {catalog} WHERE {name} = :name"
        assert ask(session, query, name=view.name) == [(view.comment,)]
        if isinstance(view, views.View):
            columns = ask(
                session,
                "SELECT attname, col_description(attrelid, attnum) FROM pg_attribute "
                "WHERE attrelid = CAST(:name AS regclass) AND attnum > 0 ORDER BY attnum",
                name=view.name,
            )
            assert [(column, comment or "") for column, comment in columns] == list(view.columns.items())
