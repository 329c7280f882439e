"""The views, against plain Python over small random n-grams and trees, in tables filled as by loads."""

import random
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from statistics import fmean
from typing import Any

import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

from draftstore.text.tokenizer import TextTokenizer
from schema.catalogue.builds import add_build
from schema.models import Build
from schema.statistics import load_counts
from schema.views import VIEWS, View
from tests.fakes.databases import publish, write_store
from tests.unit.schema.test_statistics import (
    Counts,
    KeptRow,
    load_kept,
    ranked,
    shown,
    some_counts,
    write_counts,
    write_kept,
)

HEAD = 30
COUNTS = some_counts(seed=1, tokens=600)


def ask(session: Session, query: str, **values: Any) -> list[Any]:
    rows = session.execute(text(query), values)
    return [tuple(float(value) if isinstance(value, Decimal) else value for value in row) for row in rows]


def driver(session: Session) -> psycopg.Connection[Any]:
    connection = session.connection().connection.driver_connection
    assert isinstance(connection, psycopg.Connection)
    return connection


def counted_build(session: Session, folder: Path, counts: Counts, like: Path) -> Build:
    build = add_build(session, write_counts(folder, counts, like))
    load_counts(driver(session), build.id, Path(build.path), head=HEAD)
    return build


@pytest.fixture
def counted(session: Session, tmp_path: Path, small_store: Path) -> Build:
    """Return a build of kind ngrams with its head and its spectrum; beside it is an older one with other counts."""
    other: Counts = {n: dict.fromkeys(of_n, 5) for n, of_n in COUNTS.items()}
    counted_build(session, tmp_path / "other", other, small_store)
    return counted_build(session, tmp_path / "counts", COUNTS, small_store)


@pytest.fixture
def kept_builds(session: Session, tmp_path: Path, small_store: Path) -> list[tuple[Build, list[KeptRow]]]:
    """Return two CREST builds that kept some of the n-grams, and what they kept, in order."""
    found = []
    for seed in range(2):
        dice, rows = random.Random(seed), list[KeptRow]()
        for n in (1, 2):
            for ngram, count in ranked(COUNTS[n])[:12]:
                if dice.random() < 0.7:
                    nodes = dice.randint(1, 64)
                    rows.append(
                        (len(rows) + 1, n, list(ngram), count, 3, nodes, 10 * nodes, dice.randint(5, 90))
                    )
        build = add_build(session, write_kept(tmp_path / f"kept-{seed}", rows, small_store))
        load_kept(driver(session), build.id, Path(build.path))
        found.append((build, rows))
    return found


class TestNgrams:
    def test_totals(self, session: Session, counted: Build) -> None:
        query = "SELECT n, distinct_ngrams, total, once, highest_count, mean_count FROM ngram_totals"
        found = ask(session, f"{query} WHERE build_id = :id ORDER BY n", id=counted.id)
        for (n, *figures, mean), of_n in zip(found, COUNTS.values(), strict=True):
            once = sum(count == 1 for count in of_n.values())
            total = sum(of_n.values())
            assert figures == [len(of_n), total, once, max(of_n.values())], n
            assert float(mean) == pytest.approx(total / len(of_n), abs=0.006)

    def test_the_most_common(self, session: Session, counted: Build, small_tokenizer: TextTokenizer) -> None:
        query = "SELECT rank, text, count, share, tokens FROM top_ngrams WHERE build_id = :id AND n = :n ORDER BY rank"
        for n, of_n in COUNTS.items():
            total = sum(of_n.values())
            assert ask(session, query, id=counted.id, n=n) == [
                (
                    rank,
                    shown(ngram, small_tokenizer),
                    count,
                    pytest.approx(count / total, abs=1e-8),
                    list(ngram),
                )
                for rank, (ngram, count) in enumerate(ranked(of_n)[:HEAD], 1)
            ]

    def test_the_curve_and_the_share_of_any_number(self, session: Session, counted: Build) -> None:
        curve = "SELECT top, least_count, occurrences, share FROM ngram_curve"
        curve += " WHERE build_id = :id AND n = :n ORDER BY top"
        shares = "SELECT top, ngram_share(:id, :n, top) FROM unnest(CAST(:numbers AS bigint[])) top"
        for n, of_n in COUNTS.items():
            ordered = sorted(of_n.values(), reverse=True)
            total = sum(ordered)
            rows = ask(session, curve, id=counted.id, n=n)
            assert [row[1] for row in rows] == sorted(set(ordered), reverse=True)
            for top, least, occurrences, share in rows:
                assert (min(ordered[:top]), sum(ordered[:top])) == (least, occurrences)
                assert float(share) == pytest.approx(occurrences / total, abs=1e-8)
            assert (rows[-1][0], rows[-1][3]) == (len(of_n), 1.0)
            for top, share in ask(session, shares, id=counted.id, n=n, numbers=list(range(len(of_n) + 3))):
                expected = float(Fraction(sum(ordered[:top]), total))
                assert float(share) == pytest.approx(expected, abs=1e-8), (n, top)
        assert ask(session, "SELECT ngram_share(12345, 1, 10)") == [(None,)]


class TestTrees:
    def test_sizes_bytes_and_texts(
        self, session: Session, kept_builds: list[tuple[Build, list[KeptRow]]], small_tokenizer: TextTokenizer
    ) -> None:
        build, kept = kept_builds[0]
        sizes = "SELECT n, entries, mean_nodes, least_nodes, most_nodes, nodes FROM tree_sizes"
        taken = (
            "SELECT n, entries, raw_bytes, bytes, raw_bytes_per_entry, bytes_per_entry, ratio FROM bytes_by_n"
        )
        rows = ask(session, f"{sizes} WHERE build_id = :id ORDER BY n", id=build.id)
        assert [row[0] for row in rows] == [1, 2]
        for n, *found in rows:
            nodes = [row[5] for row in kept if row[1] == n]
            mean = pytest.approx(fmean(nodes), abs=0.006)
            assert found == [len(nodes), mean, min(nodes), max(nodes), sum(nodes)]
        rows = ask(session, f"{taken} WHERE build_id = :id ORDER BY n", id=build.id)
        assert [row[0] for row in rows] == [1, 2]
        for n, *found in rows:
            raw, stored = [row[6] for row in kept if row[1] == n], [row[7] for row in kept if row[1] == n]
            assert found[:3] == [len(raw), sum(raw), sum(stored)]
            assert [float(value) for value in found[3:]] == pytest.approx(
                [fmean(raw), fmean(stored), sum(raw) / sum(stored)], abs=0.06
            )

    def test_coverage(
        self, session: Session, counted: Build, kept_builds: list[tuple[Build, list[KeptRow]]]
    ) -> None:
        build, kept = kept_builds[0]
        query = "SELECT n, kept, distinct_ngrams, occurrences, total, share FROM kept_coverage WHERE build_id = :id"
        rows = ask(session, f"{query} ORDER BY n", id=build.id)
        assert [row[0] for row in rows] == [1, 2]
        for n, *found in rows:
            of_n, total = [row[3] for row in kept if row[1] == n], sum(COUNTS[n].values())
            share = pytest.approx(sum(of_n) / total, abs=1e-8)
            assert found == [len(of_n), len(COUNTS[n]), sum(of_n), total, share]


@pytest.mark.parametrize("view", [view.name for view in VIEWS if isinstance(view, View)])
def test_rows_of_a_build_have_its_name(
    session: Session, counted: Build, kept_builds: list[tuple[Build, list[KeptRow]]], view: str
) -> None:
    publish(session, "small", kept_builds[0][0].id)
    session.execute(text("UPDATE builds SET name = 'build ' || id"))
    session.execute(text("UPDATE release_moves SET lengths = '{\"chats\": 2.5}'"))
    rows = ask(session, f"SELECT build_id, build FROM {view}")
    assert rows
    assert all(name == f"build {number}" for number, name in rows)


def test_live_releases(session: Session, tmp_path: Path) -> None:
    builds = [add_build(session, write_store(tmp_path / str(i), name=f"store {i}")) for i in range(2)]
    none = add_build(session, write_store(tmp_path / "recycling", kind="recycling", corpus=None))
    for name, build in (("chat", builds[0]), ("chat", builds[1]), ("fast", none)):
        publish(session, name, build.id)
    query = "SELECT release, build_id, kind, build, corpus, documents, tokens, bytes, path FROM live_releases"
    assert ask(session, f"{query} ORDER BY release") == [
        ("chat", builds[1].id, "rest", "store 1", "texts.jsonl", 2, 10, 3, builds[1].path),
        ("fast", none.id, "recycling", "small", None, None, None, 3, none.path),
    ]
    assert ask(session, "SELECT live_build('chat'), live_build('other')") == [(builds[1].id, None)]
