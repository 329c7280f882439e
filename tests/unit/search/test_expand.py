from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, reject
from hypothesis import strategies as st
from numpy.typing import NDArray

from draftstore.search.expand import Rule, draft_batch, draft_one, power_of
from draftstore.search.suffix import SuffixIndex
from draftstore.stores.rest.store import STRATEGIES, RestDrafter
from draftstore.trees.frontier import MAX_BUDGET
from draftstore.trees.tree import LEVEL_PROBS, DraftTree, highest_level, level_of
from tests import reference
from tests.examples import examples
from tests.reference import Documents, Nodes, UnclearError, make_index, nodes_of

NARROW, WIDE = 5, 151_665
"""Vocabularies of u16 and u32 stores; tests use the highest ids of either."""
UNSAMPLED = 1 << 50
"""Rows for which the small corpora of these tests are read to the last occurrence, where a suffix has a share of more
than `LEAST` left and a draft has one node only. Sampled trees differ from those of the oracles and of other budgets.
"""
LEAST = 1e-9

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
def contexts(draw: st.DrawFn, corpus: Corpus, vocab_size: int = NARROW, foreign: bool = True) -> list[int]:
    """Draw pieces of the documents; sometimes with other ids around them, even outside the vocabulary."""
    tokens = joined(documents_of(corpus)) or [vocab_size - 1]
    wrong = [-1, vocab_size, 65_535, 2**31 - 1, -(2**31)] if foreign else []
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
    floor=st.sampled_from([0.0, 0.01, 0.0713]),
    alpha=st.sampled_from([0.731, 0.113, 0.0, 3.17]),
    beta=st.sampled_from([0.377, 0.0, 1.93, 6.0]),
    gamma=st.just(0.75),
)
BUDGETS = st.integers(1, 8) | st.integers(1, 64)
MIN_PROBS = st.sampled_from([0.003, 0.01, 0.03, 0.3])


def draft(
    index: SuffixIndex, rule: Rule, context: Sequence[int], budget: int = 64, max_level: int = 255
) -> tuple[DraftTree, int, int]:
    """Draft for one context: the tree, the length of the match, its occurrences."""
    arrays = draft_one(*index, rule.pack(), np.array(context, np.int32), budget, max_level)
    tokens, parents, levels, match, count = arrays
    assert (tokens.dtype, parents.dtype, levels.dtype) == (np.int32, np.int16, np.uint8)
    return DraftTree(tokens, parents, levels), match, count


def draft_all(
    index: SuffixIndex, rule: Rule, batch: NDArray[np.int32], budget: int = 64, max_level: int = 255
) -> list[tuple[DraftTree, int, int]]:
    tokens, parents, levels, summary = draft_batch(index, rule.pack(), batch, budget, max_level)
    assert (tokens.dtype, parents.dtype, levels.dtype) == (np.int32, np.int16, np.uint8)
    assert tokens.shape == parents.shape == levels.shape == (len(batch), budget)
    assert summary.shape == (len(batch), 4)
    return [
        (DraftTree(tokens[i, :size], parents[i, :size], levels[i, :size]), match, count)
        for i, (size, match, count, _) in enumerate(summary.tolist())
    ]


def expected_match(documents: Documents, rule: Rule, context: list[int]) -> tuple[int, int]:
    """Return what a draft says of its match; one that is too short for the rule counts as none."""
    match = reference.longest_match(documents, context)
    return match if match[0] >= rule.min_match else (0, 0)


# -- against the oracles -------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab_size", [NARROW, WIDE])
@examples(200)
@given(st.data(), RULES, BUDGETS, st.integers(0, 255))
def test_the_longest_match_is_drawn_as_a_trie(
    vocab_size: int, data: st.DataObject, rule: Rule, budget: int, max_level: int
) -> None:
    corpus = data.draw(corpora(vocab_size))
    context = data.draw(contexts(corpus, vocab_size))
    rule = rule._replace(alpha=0.0, beta=0.0, min_match=data.draw(st.integers(1, 3)))
    assert_agrees(reference.longest_tree, corpus, vocab_size, context, rule, budget, max_level)


@pytest.mark.parametrize("vocab_size", [NARROW, WIDE])
@examples(300)
@given(st.data(), RULES | st.just(BACKOFF), BUDGETS, MIN_PROBS)
def test_every_node_backs_off_to_shorter_matches(
    vocab_size: int, data: st.DataObject, rule: Rule, budget: int, min_prob: float
) -> None:
    corpus = data.draw(corpora(vocab_size))
    context = data.draw(contexts(corpus, vocab_size))
    assert_agrees(reference.backoff_tree, corpus, vocab_size, context, rule, budget, highest_level(min_prob))


@examples(30)
@given(st.data(), RULES)
def test_backing_off_reaches_the_end_of_the_grid(data: st.DataObject, rule: Rule) -> None:
    corpus = data.draw(corpora())
    context = data.draw(contexts(corpus))
    rule = rule._replace(depth=3, floor=1e-4)
    assert_agrees(reference.backoff_tree, corpus, NARROW, context, rule, 64, 255)


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
    assert tuple(match) == expected_match(documents, rule, text)


@pytest.mark.parametrize("vocab_size", [NARROW, WIDE])
def test_rich_corpora_agree_with_the_oracles(vocab_size: int) -> None:
    rng = np.random.default_rng(17)
    nodes = 0
    for _ in range(120):
        documents = [(vocab_size - rng.zipf(1.7, 14).clip(1, 4)).tolist() for _ in range(9)]
        corpus = [documents[:4], documents[4:5], documents[5:]]
        index = make_index(corpus, vocab_size)
        start = int(rng.integers(0, 8))
        context = [*rng.integers(vocab_size - 4, vocab_size, 3).tolist(), *documents[0][start : start + 6]]
        budget = int(rng.integers(4, 64))
        rule = BACKOFF._replace(
            alpha=float(rng.uniform(0.1, 4)), beta=float(rng.uniform(0.0, 2)), max_match=5
        )
        expected = reference.backoff_tree(documents, rule, context[-5:], budget, 120)
        assert nodes_of(draft(index, rule, context, budget, 120)[0]) == expected
        nodes += len(expected)
        expected = reference.longest_tree(documents, LONGEST, context, budget, 255)
        assert nodes_of(draft(index, LONGEST, context, budget)[0]) == expected
    assert nodes > 120 * 15


def test_a_worked_example() -> None:
    """After 5 7 come 5 and 9, each once; after 7 alone the same, so what 5 7 leaves goes to them again."""
    index = make_index([[[5, 7, 5, 7, 9]]], 10)
    half = level_of(0.5)
    assert nodes_of(draft(index, LONGEST, [5, 7])[0]) == [
        (5, -1, half),
        (9, -1, half),
        (7, 0, half),
        (9, 2, half),
    ]
    rule = BACKOFF._replace(alpha=1.0, beta=1.0, depth=1)
    left = 3 / 5  # of two occurrences with two followers; the suffix 7 keeps 2/5 of that
    each = (2 / 5 + left * 2 / 5) / 2
    assert nodes_of(draft(index, rule, [5, 7])[0]) == [(5, -1, level_of(each)), (9, -1, level_of(each))]
    assert draft(index, rule, [5, 7])[1:] == (2, 2)


def test_the_end_of_a_document_is_a_follower_without_a_token() -> None:
    index = make_index([[[1, 2], [1, 2], [1, 2, 3], [1, 2, 4]]], NARROW)
    rule = LONGEST._replace(depth=1)
    assert nodes_of(draft(index, rule, [1, 2])[0]) == [(3, -1, level_of(1 / 4)), (4, -1, level_of(1 / 4))]
    rule = BACKOFF._replace(alpha=0.0, beta=1.0, depth=1, max_match=1)
    assert nodes_of(draft(index, rule, [2])[0]) == [(3, -1, level_of(1 / 7)), (4, -1, level_of(1 / 7))]


# -- segments ------------------------------------------------------------------------------------------------


@examples(200)
@given(st.data(), RULES, BUDGETS)
def test_segments_add_up(data: st.DataObject, rule: Rule, budget: int) -> None:
    corpus = data.draw(corpora())
    context = data.draw(contexts(corpus))
    rule = rule._replace(floor=0.01, alpha=0.731, beta=0.377)
    whole = make_index([documents_of(corpus)], NARROW)
    parts = make_index(corpus, NARROW)
    single = make_index([[document] for document in documents_of(corpus)], NARROW)
    for form in (rule, rule._replace(alpha=0.0, beta=0.0)):
        drafts = [
            draft(index, form, context, budget, highest_level(0.01)) for index in (whole, parts, single)
        ]
        assert drafts[0] == drafts[1] == drafts[2]


# -- promises of every tree ----------------------------------------------------------------------------------


@examples(300)
@given(st.data(), RULES, BUDGETS, st.integers(0, 255), st.integers(1, 40) | st.just(512))
def test_trees_keep_the_contract(
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
        assert set(tree.tokens.tolist()) <= {token for document in documents_of(corpus) for token in document}
        assert_chances_are_shared(tree)


def assert_chances_are_shared(tree: DraftTree) -> None:
    """Children are not likelier together than their parent, but for the rounding of each."""
    for node in range(-1, len(tree)):
        children = np.flatnonzero(tree.parents == node)
        bound = 1.0 if node < 0 else float(tree.probs[node])
        assert float(tree.probs[children].sum()) <= bound * 2 ** (1 / 16) + 1e-6


@given(st.data(), RULES, BUDGETS)
def test_drafts_never_cross_a_document(data: st.DataObject, rule: Rule, budget: int) -> None:
    corpus = data.draw(corpora())
    context = data.draw(contexts(corpus, foreign=False))
    documents = documents_of(corpus)
    index = make_index(corpus, NARROW)
    tree, match, _ = draft(index, LONGEST, context, budget)
    for path in map(tree.path, range(len(tree))):
        said = context[len(context) - match :] + tree.tokens[path].tolist()
        assert reference.continuations(documents, said)
    tree, match, _ = draft(index, rule, context, budget)
    for path in map(tree.path, range(len(tree))):
        said = context[len(context) - match :] + tree.tokens[path].tolist()
        for pair in pairwise(said[match - 1 :]):
            assert reference.continuations(documents, list(pair))


def test_next_document_is_not_a_continuation() -> None:
    for corpus in ([[[1, 2], [3, 4]]], [[[1, 2]], [[3, 4]]]):
        index = make_index(corpus, NARROW)
        for rule in (LONGEST, BACKOFF):
            assert len(draft(index, rule, [1, 2])[0]) == 0
            assert draft(index, rule, [1, 2])[1:] == (2, 1)
            assert draft(index, rule, [1, 2, 3])[0].tokens.tolist() == ([] if rule is LONGEST else [4])


# -- budgets and bounds --------------------------------------------------------------------------------------


@given(st.data(), RULES, st.integers(0, 255))
def test_the_longest_match_with_less_budget_is_a_prefix(
    data: st.DataObject, rule: Rule, max_level: int
) -> None:
    corpus = data.draw(corpora())
    context = data.draw(contexts(corpus))
    index = make_index(corpus, NARROW)
    whole = draft(index, LONGEST, context, MAX_BUDGET)[0]
    for budget in (*range(1, 65), len(whole) or 1):
        tree = draft(index, LONGEST, context, budget)[0]
        assert tree == whole.prefix(budget)
        bounded = draft(index, LONGEST, context, budget, max_level)[0]
        assert bounded == tree.prefix(int(np.count_nonzero(tree.levels <= max_level)))


@given(st.data(), RULES)
def test_backing_off_with_less_budget_only_loses_chances(data: st.DataObject, rule: Rule) -> None:
    """The smaller tree is no prefix: in a full array, nodes are shared out no further than the last one kept.

    What holds: it has as many nodes as the prefix, none likelier than in the larger tree, and those below the
    context, which are entered into an empty array, are the same. Without shorter suffixes it is a prefix.
    """
    corpus = data.draw(corpora())
    context = data.draw(contexts(corpus))
    index = make_index(corpus, NARROW)
    rule = rule._replace(floor=max(rule.floor, LEAST))
    whole = draft(index, rule, context, MAX_BUDGET)[0]
    chances = {
        tuple(whole.tokens[whole.path(node)].tolist()): whole.levels[node] for node in range(len(whole))
    }
    alone = rule._replace(floor=1.0)
    for budget in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64):
        tree = draft(index, rule, context, budget)[0]
        assert len(tree) == min(budget, len(whole))
        for node in range(len(tree)):
            path = tuple(tree.tokens[tree.path(node)].tolist())
            assert chances[path] <= tree.levels[node]
            assert len(path) > 1 or chances[path] == tree.levels[node]
        assert draft(index, alone, context, budget)[0] == draft(index, alone, context, MAX_BUDGET)[0].prefix(
            budget
        )


@given(st.data(), RULES, st.floats(0.0, 1.0))
def test_a_bound_cuts_what_lies_below_it(data: st.DataObject, rule: Rule, min_prob: float) -> None:
    corpus = data.draw(corpora())
    context = data.draw(contexts(corpus))
    index = make_index(corpus, NARROW)
    rule = rule._replace(depth=3, rows=512)
    whole = draft(index, rule, context, MAX_BUDGET)[0]
    assert len(whole) < MAX_BUDGET
    kept = int(np.count_nonzero(LEVEL_PROBS[whole.levels] >= min_prob))
    assert draft(index, rule, context, MAX_BUDGET, highest_level(min_prob))[0] == whole.prefix(kept)
    [result] = RestDrafter(index, rule).draft(
        np.array([context], np.int32).reshape(1, -1), MAX_BUDGET, min_prob
    )
    assert result.tree == whole.prefix(kept)


def test_the_largest_budget_is_filled() -> None:
    rng = np.random.default_rng(7)
    index = make_index([[rng.integers(0, NARROW, 20_000).tolist()]], NARROW)
    for rule in (
        LONGEST._replace(max_match=2, rows=20_000),
        BACKOFF._replace(alpha=0.5, beta=0.1, floor=0.0),
    ):
        tree = draft(index, rule, [1, 2], MAX_BUDGET)[0]
        tree.validate()
        assert len(tree) == MAX_BUDGET


# -- contexts ------------------------------------------------------------------------------------------------


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


def test_one_token_is_enough_for_back_off_alone() -> None:
    index = make_index([[[1, 2, 3]]], NARROW)
    assert draft(index, LONGEST, [1]) == (DraftTree.empty(), 0, 0)
    assert draft(index, LONGEST, [0, 2]) == (DraftTree.empty(), 0, 0)
    assert draft(index, BACKOFF, [1])[0].tokens.tolist() == [2, 3]
    assert draft(index, BACKOFF, [1])[1:] == (1, 1)


@given(st.data(), RULES, st.lists(st.integers(-(2**31), 2**31 - 1), max_size=20))
def test_a_foreign_id_hides_all_before_it(data: st.DataObject, rule: Rule, before: list[int]) -> None:
    corpus = data.draw(corpora())
    context = data.draw(contexts(corpus, foreign=False))
    index = make_index(corpus, NARROW)
    foreign = data.draw(st.sampled_from([-1, NARROW, 65_535, 2**31 - 1]))
    assert draft(index, rule, [*before, foreign, *context]) == draft(index, rule, context)


@given(st.data(), RULES, st.lists(st.integers(0, NARROW - 1), max_size=20))
def test_no_more_of_a_context_is_matched_than_the_rule_says(
    data: st.DataObject, rule: Rule, before: list[int]
) -> None:
    corpus = data.draw(corpora())
    context = [*before, *data.draw(contexts(corpus))]
    index = make_index(corpus, NARROW)
    found = draft(index, rule, context)
    assert found == draft(index, rule, context[-rule.max_match :])
    assert found[1] <= rule.max_match


# -- batches, threads ----------------------------------------------------------------------------------------


@given(st.data(), RULES, BUDGETS, st.integers(1, 60))
def test_a_batch_drafts_what_single_calls_do(data: st.DataObject, rule: Rule, budget: int, rows: int) -> None:
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


def big_index() -> tuple[SuffixIndex, NDArray[np.int32]]:
    rng = np.random.default_rng(11)
    documents = [((rng.zipf(1.5, 400) - 1) % 50).tolist() for _ in range(30)]
    return make_index([documents[:20], documents[20:]], 50), rng.integers(0, 6, (64, 16)).astype(np.int32)


@pytest.mark.parametrize("rule", STRATEGIES.values(), ids=STRATEGIES)
def test_threads_and_repetitions_draft_the_same(rule: Rule) -> None:
    index, batch = big_index()
    expected = draft_all(index, rule, batch)
    assert sum(len(tree) for tree, _, _ in expected) > 1000
    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(draft_all, index, rule, batch) for _ in range(40)]
        assert all(job.result() == expected for job in jobs)


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


def test_sampling_reaches_the_high_ids_of_a_range() -> None:
    documents = [[0, 1 + number % 40] for number in range(4_000)]
    index = make_index([documents], 50)
    tree = draft(index, LONGEST._replace(min_match=1, depth=1, rows=80), [0])[0]
    assert sorted(tree.tokens.tolist()) == list(range(1, 41))
    assert float(tree.probs.max()) < 2 / 40


@pytest.mark.parametrize("rows", [1, 2, 7])
def test_very_few_rows_still_make_trees(rows: int) -> None:
    index, batch = big_index()
    for rule in STRATEGIES.values():
        drafts = draft_all(index, rule._replace(rows=rows), batch)
        assert drafts == draft_all(index, rule._replace(rows=rows), batch)
        for tree, match, _ in drafts:
            tree.validate()
            assert len(tree) > 0 or match < rule.min_match


def test_a_rule_crosses_into_the_kernel_as_numbers() -> None:
    packed = BACKOFF.pack()
    assert packed.dtype == np.float64
    assert Rule(*packed.tolist()) == BACKOFF


@given(st.data(), BUDGETS)
def test_without_mistrust_back_off_is_the_longest_match(data: st.DataObject, budget: int) -> None:
    corpus = data.draw(corpora())
    context = reference.usable(data.draw(contexts(corpus)), 16, NARROW)
    rule = BACKOFF._replace(alpha=0.0, beta=0.0, depth=4)
    documents = documents_of(corpus)
    try:
        trie = reference.longest_tree(documents, rule, context, budget, 255)
        assert reference.backoff_tree(documents, rule, context, budget, 255) == trie
    except UnclearError:
        reject()
    assert nodes_of(draft(make_index(corpus, NARROW), rule, context, budget)[0]) == trie


@pytest.mark.parametrize("exponent", [0.0, 0.25, 0.7, 0.75, 1.0, 1e-12, np.nextafter(1.0, 0.0)])
def test_powers_are_powers(exponent: float) -> None:
    for base in np.geomspace(1.0, 1e12, 200):
        assert power_of(base, exponent) == pytest.approx(base**exponent, rel=1e-14)
    assert power_of(81.0, 0.75) == 27.0
