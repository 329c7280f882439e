r"""Views and functions for common SQL queries, with comments that `\d+` and `\df+` show.

Anything that needs all n-grams uses the spectrum, which is complete and small, not the head of the most common ones.
Migrations drop the views before they change tables and recreate them at the newest revision (`migrations/env.py`), so
this file always holds the current definitions. A change here needs a revision, possibly empty; a test checks this.
"""

import dataclasses
from typing import ClassVar


@dataclasses.dataclass(frozen=True)
class View:
    """A view: name, comment, columns with comments, and query."""

    name: str
    comment: str
    columns: dict[str, str]
    query: str
    kind: ClassVar[str] = "VIEW"

    def create(self) -> list[str]:
        """Return the statements that create the view and its comments."""
        return [
            f"CREATE VIEW {self.name} ({', '.join(self.columns)}) AS\n{self.query.strip()}",
            f"COMMENT ON VIEW {self.name} IS {_quoted(self.comment)}",
            *(
                f"COMMENT ON COLUMN {self.name}.{column} IS {_quoted(comment)}"
                for column, comment in self.columns.items()
                if comment
            ),
        ]


@dataclasses.dataclass(frozen=True)
class Function:
    """A function with a single query: name, arguments and result in SQL, comment, and query."""

    name: str
    arguments: str
    returns: str
    comment: str
    query: str
    kind: ClassVar[str] = "FUNCTION"

    def create(self) -> list[str]:
        """Return the statements that create the function and its comment."""
        return [
            f"CREATE FUNCTION {self.name}({self.arguments}) RETURNS {self.returns}\n"
            f"LANGUAGE sql STABLE PARALLEL SAFE\nBEGIN ATOMIC\n{self.query.strip()};\nEND",
            f"COMMENT ON FUNCTION {self.name} IS {_quoted(self.comment)}",
        ]


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


BUILD = "id of the build"
BUILD_NAME = "name of the build"
N = "number of tokens"

VIEWS: tuple[View | Function, ...] = (
    View(
        "live_releases",
        "live build of each release",
        {
            "release": "",
            "build_id": BUILD,
            "kind": "",
            "build": BUILD_NAME,
            "corpus": "name of its corpus",
            "documents": "documents of its corpus",
            "tokens": "tokens of its corpus",
            "bytes": "bytes of its files",
            "moved_at": "when the release was last published or rolled back",
            "path": "directory of the store",
        },
        """
SELECT releases.name, builds.id, builds.kind, builds.name, corpora.name, corpora.documents, corpora.tokens,
       builds.size_bytes, releases.moved_at, builds.path
FROM releases JOIN builds ON builds.id = releases.build_id LEFT JOIN corpora ON corpora.id = builds.corpus_id
""",
    ),
    Function(
        "live_build",
        "release text",
        "bigint",
        "live build of a release: ... WHERE build_id = live_build('chat-vicuna')",
        "SELECT releases.build_id FROM releases WHERE releases.name = live_build.release",
    ),
    View(
        "release_lengths",
        "accepted lengths of the builds of a release over time, by recording: ... WHERE release = 'chat-vicuna' "
        "ORDER BY moved_at",
        {
            "release": "",
            "moved_at": "when it was published or rolled back",
            "action": "publish or rollback",
            "build_id": "id of the build; it may have been dropped since",
            "build": "name of the build; null if it has been dropped",
            "recording": "name of the registered recording",
            "accepted_length": "M = tokens / passes; plain decoding is 1.0",
        },
        """
SELECT moves.release, moves.moved_at, moves.action, moves.to_build, builds.name, lengths.key, lengths.value::float8
FROM release_moves moves LEFT JOIN builds ON builds.id = moves.to_build
CROSS JOIN jsonb_each_text(moves.lengths) lengths
""",
    ),
    View(
        "ngram_totals",
        "number of n-grams in a corpus by n, distinct and total (Table 1 of CREST)",
        {
            "build_id": BUILD,
            "build": BUILD_NAME,
            "n": N,
            "distinct_ngrams": "number of distinct n-grams",
            "total": "occurrences of all n-grams",
            "once": "number of n-grams that occur once",
            "highest_count": "occurrences of the most common one",
            "mean_count": "mean occurrences of an n-gram",
        },
        """
SELECT build_id, name, n, sum(ngrams)::bigint, sum(count * ngrams)::bigint,
       coalesce(sum(ngrams) FILTER (WHERE count = 1), 0)::bigint, max(count),
       round(sum(count * ngrams) / sum(ngrams), 2)
FROM ngram_spectrum JOIN builds ON builds.id = build_id GROUP BY build_id, name, n
""",
    ),
    View(
        "top_ngrams",
        "most common n-grams with their text: ... WHERE build_id = 3 AND n = 2 ORDER BY rank LIMIT 20",
        {
            "build_id": BUILD,
            "build": BUILD_NAME,
            "n": N,
            "rank": "1 is the most common of this n",
            "text": "text of the tokens",
            "count": "occurrences in the corpus",
            "share": "share of all occurrences of n-grams of this n, 0 to 1",
            "tokens": "token ids",
        },
        """
SELECT ngrams.build_id, ngram_totals.build, ngrams.n, ngrams.rank, ngrams.text, ngrams.count,
       round(ngrams.count::numeric / ngram_totals.total, 8), ngrams.tokens
FROM ngrams JOIN ngram_totals ON ngram_totals.build_id = ngrams.build_id AND ngram_totals.n = ngrams.n
""",
    ),
    View(
        "ngram_curve",
        "share of all occurrences that the most common n-grams cover (Fig. 4 of CREST), exact: one row for each "
        "count; ngram_share() computes it for any number of n-grams",
        {
            "build_id": BUILD,
            "build": BUILD_NAME,
            "n": N,
            "top": "number of n-grams, the most common first",
            "least_count": "count of the rarest of them",
            "occurrences": "occurrences of all of them",
            "share": "share of all occurrences of n-grams of this n, 0 to 1",
        },
        """
SELECT build_id, name, n, (sum(ngrams) OVER common)::bigint, count, (sum(count * ngrams) OVER common)::bigint,
       round((sum(count * ngrams) OVER common) / sum(count * ngrams) OVER (PARTITION BY build_id, n), 8)
FROM ngram_spectrum JOIN builds ON builds.id = build_id
WINDOW common AS (PARTITION BY build_id, n ORDER BY count DESC ROWS UNBOUNDED PRECEDING)
""",
    ),
    Function(
        "ngram_share",
        "build bigint, n integer, top bigint",
        "numeric",
        "share of all occurrences that the top most common n-grams of a build cover, exact: "
        "ngram_share(3, 2, 10000)",
        """
SELECT round((curve.occurrences - (curve.top - least(ngram_share.top, totals.distinct_ngrams)) * curve.least_count)
             / totals.total::numeric, 8)
FROM ngram_curve curve JOIN ngram_totals totals ON totals.build_id = curve.build_id AND totals.n = curve.n
WHERE curve.build_id = ngram_share.build AND curve.n = ngram_share.n
  AND curve.top >= least(ngram_share.top, totals.distinct_ngrams)
ORDER BY curve.top LIMIT 1
""",
    ),
    View(
        "tree_sizes",
        "number of n-grams that a CREST build kept, and sizes of their draft trees, by n (Table 2 of CREST)",
        {
            "build_id": BUILD,
            "build": BUILD_NAME,
            "n": N,
            "entries": "number of n-grams kept",
            "mean_nodes": "mean number of nodes in a tree",
            "least_nodes": "nodes of the smallest tree",
            "most_nodes": "nodes of the largest tree",
            "nodes": "nodes of all trees",
        },
        """
SELECT build_id, name, n, count(*), round(avg(nodes), 2), min(nodes), max(nodes), sum(nodes)
FROM kept_ngrams JOIN builds ON builds.id = build_id GROUP BY build_id, name, n
""",
    ),
    View(
        "bytes_by_n",
        "bytes of the draft trees of a CREST build by n, before and after compression",
        {
            "build_id": BUILD,
            "build": BUILD_NAME,
            "n": N,
            "entries": "number of n-grams kept",
            "raw_bytes": "bytes of their trees before compression",
            "bytes": "bytes of their trees as stored, without keys and pages",
            "raw_bytes_per_entry": "",
            "bytes_per_entry": "",
            "ratio": "raw_bytes / bytes",
        },
        """
SELECT build_id, name, n, count(*), sum(raw_bytes), sum(bytes), round(avg(raw_bytes), 1), round(avg(bytes), 1),
       round(sum(raw_bytes)::numeric / nullif(sum(bytes), 0), 2)
FROM kept_ngrams JOIN builds ON builds.id = build_id GROUP BY build_id, name, n
""",
    ),
    View(
        "kept_coverage",
        "share of all n-grams, and of their occurrences, that a CREST build kept, by n; uses the newest n-gram counts "
        "of the same corpus",
        {
            "build_id": BUILD,
            "build": BUILD_NAME,
            "n": N,
            "kept": "number of n-grams kept",
            "distinct_ngrams": "number of distinct n-grams in the corpus",
            "occurrences": "occurrences of the kept ones",
            "total": "occurrences of all n-grams",
            "share": "occurrences / total, 0 to 1",
        },
        """
SELECT kept.build_id, builds.name, kept.n, kept.entries, totals.distinct_ngrams, kept.occurrences, totals.total,
       round(kept.occurrences::numeric / totals.total, 8)
FROM (
    SELECT build_id, n, count(*) AS entries, sum(count)::bigint AS occurrences
    FROM kept_ngrams GROUP BY build_id, n
) kept
JOIN builds ON builds.id = kept.build_id
JOIN LATERAL (
    SELECT counted.id FROM builds counted
    WHERE counted.corpus_id = builds.corpus_id AND counted.kind = 'ngrams' AND counted.state = 'finished'
      AND EXISTS (SELECT FROM ngram_spectrum WHERE ngram_spectrum.build_id = counted.id)
    ORDER BY counted.id DESC LIMIT 1
) counts ON true
JOIN ngram_totals totals ON totals.build_id = counts.id AND totals.n = kept.n
""",
    ),
)


def create_statements() -> list[str]:
    """Return the statements that create all views and functions."""
    return [statement for view in VIEWS for statement in view.create()]


def drop_statements() -> list[str]:
    """Return the statements that drop all views and functions, dependent ones first."""
    return [f"DROP {view.kind} IF EXISTS {view.name}" for view in reversed(VIEWS)]
