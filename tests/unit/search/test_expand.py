import hashlib
import random
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, reject
from hypothesis import strategies as st
from numpy.typing import NDArray

from draftstore.search.expand import Rule, draft_batch, power_of
from draftstore.search.suffix import SuffixIndex
from draftstore.stores.rest.store import STRATEGIES
from draftstore.trees.batch import DraftBatch
from draftstore.trees.frontier import MAX_BUDGET
from draftstore.trees.tree import DraftTree, highest_level, level_of
from tests import reference
from tests.reference import Documents, Nodes, UnclearError, make_index, nodes_of

NARROW, WIDE = 5, 151_665
"""Vocabularies of u16 and u32 stores; tests use the highest ids of either."""
UNSAMPLED = 1 << 50
"""Rows for which the small corpora of these tests are read to the last occurrence; sampled trees differ from those of
the oracles.
"""
LONGEST = STRATEGIES["longest"]._replace(rows=UNSAMPLED)
BACKOFF = STRATEGIES["backoff"]._replace(rows=UNSAMPLED)

Corpus = list[Documents]
Oracle = Callable[[Documents, Rule, Sequence[int], int, int], Nodes]


def documents_of(corpus: Corpus) -> Documents:
    return [document for segment in corpus for document in segment]


@st.composite
def corpora(draw: st.DrawFn, vocab_size: int = NARROW) -> Corpus:
    """Draw segments of documents that are made of a few motifs, so that much occurs more than once."""
    ids = st.sampled_from(range(vocab_size - draw(st.sampled_from([4, 3, 2, 1])), vocab_size))
    motifs = draw(st.lists(st.lists(ids, min_size=1, max_size=4), min_size=1, max_size=4))
    pieces = st.sampled_from(motifs) | st.lists(ids, min_size=1, max_size=2)
    document = st.lists(pieces, min_size=draw(st.sampled_from([4, 0])), max_size=6).map(joined)
    segment = st.lists(document, min_size=draw(st.sampled_from([2, 1])), max_size=4)
    return draw(st.lists(segment, min_size=1, max_size=4))


@st.composite
def contexts(draw: st.DrawFn, corpus: Corpus, vocab_size: int = NARROW) -> list[int]:
    """Draw pieces of the documents; sometimes with other ids around them, even outside the vocabulary."""
    tokens = joined(documents_of(corpus)) or [vocab_size - 1]
    wrong = [-1, vocab_size, 65_535, 2**31 - 1, -(2**31)]
    other = st.lists(st.sampled_from([*range(vocab_size - 4, vocab_size), *wrong]), min_size=1, max_size=3)
    start = st.integers(0, len(tokens) - 1)
    piece = st.builds(lambda start, size: tokens[start : start + size], start, st.integers(1, 9))
    parts = [*draw(st.lists(piece | other, max_size=2)), draw(piece)]
    if draw(st.integers(0, 9)) == 9:
        parts.append(draw(other))
    return joined(parts) if draw(st.integers(0, 19)) < 19 else []


def joined(parts: Sequence[list[int]]) -> list[int]:
    return [token for part in parts for token in part]


RULES = st.builds(
    Rule,
    max_match=st.integers(1, 5) | st.just(16),
    min_match=st.integers(1, 2),
    depth=st.integers(1, 6),
    rows=st.just(UNSAMPLED),
    floor=st.sampled_from([0.01, 0.0001, 0.0713, 0.0]),
    alpha=st.sampled_from([0.731, 0.113, 0.0, 3.17]),
    beta=st.sampled_from([0.377, 0.0, 1.93, 6.0]),
    gamma=st.just(0.75),
)
BUDGETS = st.integers(1, 8) | st.integers(1, 64)
MIN_PROBS = st.sampled_from([0.003, 0.0001, 0.03, 0.3])


def draft(
    index: SuffixIndex, rule: Rule, context: Sequence[int], budget: int = 64, max_level: int = 255
) -> tuple[DraftTree, int, int]:
    """Draft for one context: the tree, the length of the match, its occurrences."""
    return draft_all(index, rule, np.array([context], np.int32), budget, max_level)[0]


def draft_all(
    index: SuffixIndex, rule: Rule, batch: NDArray[np.int32], budget: int = 64, max_level: int = 255
) -> list[tuple[DraftTree, int, int]]:
    *arrays, distinct = draft_batch(*index, rule.pack(), batch, budget, max_level)
    drafts = DraftBatch(*arrays)
    assert drafts.tokens.shape == drafts.parents.shape == drafts.levels.shape == (len(batch), budget)
    assert len(distinct) == len(batch)
    return [each[:3] for each in drafts.drafts()]


# -- against the oracles -------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab_size", [NARROW, WIDE])
@given(st.data(), RULES, BUDGETS, st.integers(0, 255))
def test_the_longest_match_is_drawn_as_a_trie(
    vocab_size: int, data: st.DataObject, rule: Rule, budget: int, max_level: int
) -> None:
    corpus = data.draw(corpora(vocab_size))
    context = data.draw(contexts(corpus, vocab_size))
    rule = rule._replace(alpha=0.0, beta=0.0, min_match=data.draw(st.integers(1, 3)))
    assert_agrees(reference.longest_tree, corpus, vocab_size, context, rule, budget, max_level)


@pytest.mark.parametrize("vocab_size", [NARROW, WIDE])
@given(st.data(), RULES | st.just(BACKOFF), BUDGETS, MIN_PROBS)
def test_every_node_backs_off_to_shorter_matches(
    vocab_size: int, data: st.DataObject, rule: Rule, budget: int, min_prob: float
) -> None:
    corpus = data.draw(corpora(vocab_size))
    context = data.draw(contexts(corpus, vocab_size))
    assert_agrees(reference.backoff_tree, corpus, vocab_size, context, rule, budget, highest_level(min_prob))


def assert_agrees(
    oracle: Oracle,
    corpus: Corpus,
    vocab_size: int,
    context: list[int],
    rule: Rule,
    budget: int,
    max_level: int,
) -> None:
    documents = documents_of(corpus)
    text = reference.usable(context, rule.max_match, vocab_size)
    try:
        expected = oracle(documents, rule, text, budget, max_level)
    except UnclearError:
        reject()
    tree, *match = draft(make_index(corpus, vocab_size), rule, context, budget, max_level)
    assert nodes_of(tree) == expected
    longest = reference.longest_match(documents, text)
    assert tuple(match) == (longest if longest[0] >= rule.min_match else (0, 0))


# -- promises of every tree ----------------------------------------------------------------------------------


@given(st.data(), RULES, BUDGETS, st.integers(0, 255), st.integers(1, 40) | st.just(512))
def test_trees_of_few_rows_keep_the_contract(
    data: st.DataObject, rule: Rule, budget: int, max_level: int, rows: int
) -> None:
    corpus = data.draw(corpora())
    context = data.draw(contexts(corpus))
    index = make_index(corpus, NARROW)
    for form in (rule._replace(rows=rows), *STRATEGIES.values()):
        tree, match, count = draft(index, form, context, budget, max_level)
        tree.validate()
        assert len(tree) <= budget
        assert tree.levels.max(initial=0) <= max_level
        assert tree.depths.max(initial=0) <= form.depth
        assert (match == 0) == (count == 0)
        assert len(tree) == 0 or match >= form.min_match
        for node in range(-1, len(tree)):  # children are not likelier than their parent, but for rounding
            bound = 1.0 if node < 0 else float(tree.probs[node])
            assert float(tree.probs[tree.parents == node].sum()) <= bound * 2 ** (1 / 16) + 1e-6


def test_the_largest_budget_is_filled() -> None:
    rng = np.random.default_rng(7)
    index = make_index([[rng.integers(0, NARROW, 20_000).tolist()]], NARROW)
    tree = draft(index, BACKOFF._replace(alpha=0.5, beta=0.1, floor=0.0), [1, 2], MAX_BUDGET)[0]
    tree.validate()
    assert len(tree) == MAX_BUDGET


@pytest.mark.parametrize("rule", [LONGEST, BACKOFF], ids=["longest", "backoff"])
@pytest.mark.parametrize("vocab_size", [NARROW, WIDE])
def test_contexts_without_a_match_get_an_empty_tree(vocab_size: int, rule: Rule) -> None:
    top = vocab_size - 1
    index = make_index([[[top, top - 1, top, top - 2]]], vocab_size)
    wrong = [vocab_size, vocab_size + 1, 65_535, -1, -2, 2**31 - 1, -(2**31)]
    misses = [[], [0], [top, 0], *([top, top - 1, token] for token in wrong if not 0 <= token < vocab_size)]
    for context in misses:
        assert draft(index, rule, context) == (DraftTree.empty(), 0, 0)
    assert draft_all(index, rule, np.empty((0, 16), np.int32)) == []
    assert draft_all(index, rule, np.empty((3, 0), np.int32)) == [(DraftTree.empty(), 0, 0)] * 3


@given(st.data(), RULES, BUDGETS, st.integers(1, 60))
def test_a_batch_gives_the_drafts_of_single_calls(
    data: st.DataObject, rule: Rule, budget: int, rows: int
) -> None:
    corpus = data.draw(corpora())
    texts = data.draw(st.lists(contexts(corpus), min_size=1, max_size=6))
    index = make_index(corpus, NARROW)
    batch = np.full((len(texts), 16), -1, np.int32)
    for row, text in zip(batch, texts, strict=True):
        row[16 - min(16, len(text)) :] = text[-16:]
    for form in (rule._replace(rows=rows), LONGEST, BACKOFF):
        single = [draft(index, form, row.tolist(), budget) for row in batch]
        assert draft_all(index, form, batch, budget) == single
        assert draft_all(index, form, np.ascontiguousarray(batch[::-1]), budget) == single[::-1]


# -- sampling ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [10, 64, 300])
@pytest.mark.parametrize("cuts", [[], [3_000], [100, 5_000, 19_990]])
def test_sampled_shares_are_near_the_exact_ones(rows: int, cuts: list[int]) -> None:
    """Evenly spaced rows of sorted continuations miss a share by less than one row at either end of a run."""
    rng = np.random.default_rng(2)
    followers = rng.choice([1, 2, 3, 4], 20_000, p=[0.6, 0.25, 0.1, 0.05])
    documents = [[0, follower] for follower in followers.tolist()]
    bounds = [0, *cuts, len(documents)]
    index = make_index([documents[a:b] for a, b in pairwise(bounds)], NARROW)
    rule = LONGEST._replace(min_match=1, depth=1, rows=rows)
    tree, match, count = draft(index, rule, [0])
    tree.validate()
    assert (match, count) == (1, 20_000)
    assert draft(index, rule, [0])[0] == tree
    found = dict(zip(tree.tokens.tolist(), tree.probs.tolist(), strict=True))
    for token in (1, 2, 3, 4):
        exact = float((followers == token).mean())
        assert found.get(token, 0.0) == pytest.approx(
            exact, rel=2 ** (1 / 31) - 1, abs=2 * (len(cuts) + 1) / rows
        )
    assert draft(index, rule._replace(rows=20_000), [0])[0].levels.tolist() == [
        level_of(float((followers == token).mean())) for token in (1, 2, 3, 4)
    ]


@pytest.mark.parametrize("exponent", [0.0, 0.25, 0.7, 0.75, 1.0, 1e-12, np.nextafter(1.0, 0.0)])
def test_powers_are_powers(exponent: float) -> None:
    for base in np.geomspace(1.0, 1e12, 200):
        assert power_of(base, exponent) == pytest.approx(base**exponent, rel=1e-14)
    assert power_of(81.0, 0.75) == 27.0


SAMPLED = {"longest": "72d7439d7523e1c7", "backoff": "dfe5f2841fb219e7"}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_drafts_are_the_same_bytes_on_every_machine(strategy: str) -> None:
    """Of suffixes that occur far more often than rows are read, in three segments."""
    salad = random.Random(5)
    phrases = [salad.choices(range(30), k=salad.randint(1, 5)) for _ in range(12)]
    documents = [joined(salad.choices(phrases, range(12, 0, -1), k=150)) for _ in range(24)]
    index = make_index([documents[:2], documents[2:23], documents[23:]], 30)
    trees = hashlib.sha256()
    for rows, budget in [(8, 64), (40, 64), (512, 16)]:
        rule = STRATEGIES[strategy]._replace(rows=rows)
        for number, document in enumerate(documents):
            tree, match, count = draft(index, rule, document[100 : 101 + number % 8], budget)
            trees.update(tree.to_bytes() + bytes([match]) + count.to_bytes(4))
    assert trees.hexdigest()[:16] == SAMPLED[strategy]
