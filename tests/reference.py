"""Slow, obvious oracles in plain Python: a corpus is a list of documents, a document a list of token ids."""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftstore.drafting.history import LENGTHS, HistoryRule
from draftstore.errors import DraftTreeError
from draftstore.jit import read_only
from draftstore.search.expand import Rule
from draftstore.search.sorting import suffix_array
from draftstore.search.suffix import SuffixIndex, first_row_table, key_layout, key_table
from draftstore.stores.dresd.kernels.dense_tree import Calibration
from draftstore.text.tokens import sentinel, token_dtype
from draftstore.trees.tree import DraftTree

Documents = list[list[int]]
Nodes = list[tuple[int, int, int]]
"""A tree: token, parent and level of every node."""


class UnclearError(Exception):
    """The right answer hangs on the last bits of a floating-point number, or on which rows are sampled."""


def make_index(
    segments: Sequence[Documents],
    vocab_size: int,
    sort: Callable[[NDArray[Any], int], NDArray[np.int32]] = suffix_array,
) -> SuffixIndex:
    """Assemble the arrays of a store with the library's own kernels: what the oracles are compared with."""
    dtype = token_dtype(vocab_size)
    layout = key_layout(vocab_size)
    texts = [read_only(np.array(closed(documents, sentinel(dtype)), dtype)) for documents in segments]
    suffixes = [read_only(sort(text, vocab_size)) for text in texts]
    keys = [key_table(text, rows, vocab_size, *layout) for text, rows in zip(texts, suffixes, strict=True)]
    lengths = [len(text) for text in texts]
    starts = np.cumsum([0, *lengths])[:-1]
    first_keys = np.cumsum([0, *map(len, keys)])[:-1]
    return SuffixIndex(
        read_only(np.concatenate(texts)),
        read_only(np.concatenate(suffixes)),
        read_only(np.concatenate(keys)),
        read_only(np.stack([first_row_table(text, vocab_size) for text in texts])),
        read_only(np.stack([starts, lengths, first_keys], axis=1).astype(np.int64)),
        vocab_size,
        *layout,
    )


def closed(documents: Documents, end: int) -> list[int]:
    """Join documents, each closed by the sentinel."""
    return [token for document in documents for token in [*document, end]]


# -- suffixes ------------------------------------------------------------------------------------------------


def sort_suffixes(text: Sequence[int]) -> list[int]:
    """Sort all suffixes; the end of the text is below every token."""
    return sorted(range(len(text)), key=lambda start: list(text[start:]))


def matching_rows(text: Sequence[int], pattern: Sequence[int]) -> list[int]:
    """Return the rows of the sorted suffixes that start with a pattern."""
    suffixes = sort_suffixes(text)
    return [
        row for row, start in enumerate(suffixes) if list(text[start : start + len(pattern)]) == list(pattern)
    ]


def pack(tokens: Sequence[int], bits: int, count: int) -> int:
    """Pack the first `count` tokens, the first one highest; what is missing is 0."""
    padded = [*tokens[:count], *[0] * (count - len(tokens))]
    return sum(token << bits * place for place, token in enumerate(reversed(padded)))


# -- matches -------------------------------------------------------------------------------------------------


def continuations(documents: Documents, pattern: Sequence[int]) -> Documents:
    """Return the rest of the document behind every occurrence of a pattern."""
    size = len(pattern)
    return [
        document[start + size :]
        for document in documents
        for start in range(len(document) - size + 1)
        if document[start : start + size] == list(pattern)
    ]


def usable(context: Sequence[int], max_match: int, vocab_size: int) -> list[int]:
    """Return the tokens of a context that are matched: the last ones, behind the last foreign id."""
    last = list(context)[-max_match:]
    foreign = [place for place, token in enumerate(last) if not 0 <= token < vocab_size]
    return last[foreign[-1] + 1 :] if foreign else last


def longest_match(documents: Documents, text: Sequence[int]) -> tuple[int, int]:
    """Return the length and the number of occurrences of the longest suffix that occurs; (0, 0) if none."""
    for size in range(len(text), 0, -1):
        count = len(continuations(documents, text[len(text) - size :]))
        if count:
            return size, count
    return 0, 0


# -- probabilities -------------------------------------------------------------------------------------------


def level(prob: float) -> int:
    """Round a probability to the nearest level of the grid; 256 and more is below it.

    Raises:
        UnclearError: it lies on the boundary of two levels.
    """
    exact = -16 * math.log2(prob)
    if abs(exact - math.floor(exact) - 0.5) < 1e-9:
        raise UnclearError
    return max(0, round(exact))


def back_off(
    documents: Documents, rule: Rule, text: Sequence[int], size: int, remaining: float, floor: float
) -> dict[int, float]:
    """Share a probability out to the tokens that may follow the last `size` tokens of a text.

    Raises:
        UnclearError: the next shorter suffix may or may not be asked, or not every occurrence is read.
    """
    after = [rest[0] if rest else None for rest in continuations(documents, text[len(text) - size :])]
    if 8 * len(after) > rule.rows * remaining:  # a draft of one node reads an eighth
        raise UnclearError
    trust = len(after) / (len(after) + rule.beta * len(set(after)) + rule.alpha)
    shares = {
        token: remaining * trust * count / len(after)
        for token, count in Counter(after).items()
        if token is not None
    }
    rest = remaining - remaining * trust
    if size == rule.min_match or trust == 1.0:
        return shares
    if math.isclose(rest, floor, rel_tol=1e-9):
        raise UnclearError
    if rest > floor:
        for token, share in back_off(documents, rule, text, size - 1, rest, floor).items():
            shares[token] = shares.get(token, 0.0) + share
    return shares


# -- trees ---------------------------------------------------------------------------------------------------


def longest_tree(
    documents: Documents, rule: Rule, context: Sequence[int], budget: int, max_level: int
) -> Nodes:
    """Draw the tree of the longest match: all its continuations as a trie, the heaviest nodes of it."""
    size, count = longest_match(documents, context)
    if size < rule.min_match or size == 0:
        return []
    rests = [rest[: rule.depth] for rest in continuations(documents, context[len(context) - size :])]
    visits = Counter(
        chain.from_iterable((tuple(rest[:end]) for end in range(1, len(rest) + 1)) for rest in rests)
    )
    chances = {path: times / count for path, times in visits.items()}
    return heaviest(chances, budget, max(map(len, chances), default=0), max_level)


class Candidate(NamedTuple):
    """A node of a tree that grows, ordered as trees are."""

    level: int
    depth: int
    token: int
    parent: int
    prob: float
    path: tuple[int, ...]


Shares = Callable[[tuple[int, ...], float, float], dict[int, float]]
"""`shares(path, prob, floor)`: what of a node's probability the tokens behind its path get."""


def backoff_tree(
    documents: Documents, rule: Rule, context: Sequence[int], budget: int, max_level: int
) -> Nodes:
    """Draw the tree of the back-off rule."""

    def shares(path: tuple[int, ...], prob: float, floor: float) -> dict[int, float]:
        text = [*context, *path]
        return back_off(documents, rule, text, longest_match(documents, text)[0], prob, floor)

    if longest_match(documents, context)[0] < max(rule.min_match, 1):
        return []
    return best_first(shares, rule.depth, rule.floor, budget, max_level)


def best_first(shares: Shares, depth: int, floor: float, budget: int, max_level: int) -> Nodes:
    """Grow a tree: expand the best node left, keep the best `budget` nodes seen."""

    def children(parent: int, path: tuple[int, ...], prob: float, floor: float) -> list[Candidate]:
        return [
            Candidate(level(share), len(path) + 1, token, parent, share, (*path, token))
            for token, share in shares(path, prob, floor).items()
            if level(share) <= max_level
        ]

    kept = sorted(children(-1, (), 1.0, floor))[:budget]
    for head in range(budget):
        if head == len(kept):
            break
        node = kept[head]
        if node.depth < depth:
            least = floor if len(kept) < budget else max(floor, kept[-1].prob)
            kept = sorted([*kept, *children(head, node.path, node.prob, least)])[:budget]
    return [(node.token, node.parent, node.level) for node in kept]


def nodes_of(tree: DraftTree) -> Nodes:
    """Return a tree in the form of the oracles."""
    return list(zip(tree.tokens.tolist(), tree.parents.tolist(), tree.levels.tolist(), strict=True))


def tree_from(nodes: Nodes) -> DraftTree:
    """Return the tree of an oracle."""
    tokens, parents, levels = zip(*nodes, strict=True) if nodes else ((), (), ())
    return DraftTree(np.array(tokens, np.int32), np.array(parents, np.int16), np.array(levels, np.uint8))


# -- n-grams -------------------------------------------------------------------------------------------------

Ngram = tuple[int, ...]


def ngrams_of(document: Sequence[int], n: int) -> list[Ngram]:
    """Return every run of n tokens of a document."""
    return [tuple(document[start : start + n]) for start in range(len(document) - n + 1)]


def ngram_counts(documents: Documents, n: int) -> "Counter[Ngram]":
    """Count the n-grams of one length; none spans two documents."""
    return Counter(ngram for document in documents for ngram in ngrams_of(document, n))


def document_counts(documents: Documents, n: int) -> "Counter[Ngram]":
    """Count the documents that every n-gram of one length occurs in."""
    return Counter(ngram for document in documents for ngram in set(ngrams_of(document, n)))


def followers(documents: Documents, ngram: Sequence[int]) -> int:
    """Return how many different tokens follow an n-gram, the end of a document being one."""
    return len({rest[0] if rest else None for rest in continuations(documents, ngram)})


def ngram_tree(documents: Documents, ngram: Sequence[int], nodes: int, depth: int) -> Nodes:
    """Cut the tree of an n-gram that occurs: the heaviest nodes of the trie of all its continuations."""
    rule = Rule(len(ngram), len(ngram), depth, rows=1, floor=0.0, alpha=0.0, beta=0.0, gamma=0.0)
    return longest_tree(documents, rule, ngram, nodes, 255)


def paths_of(nodes: Nodes) -> dict[Ngram, int]:
    """Return the level of every path of a tree."""
    paths: list[Ngram] = []
    for token, parent, _ in nodes:
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return dict(zip(paths, (level_ for _, _, level_ in nodes), strict=True))


def level_prob(level_: int) -> float:
    """Return the probability of a level, as trees hold it."""
    return float(np.float32(2.0 ** (-level_ / 16)))


# -- selection ----------------------------------------------------------------------------------------------


def all_ngrams(documents: Documents, max_n: int) -> "Counter[Ngram]":
    """Count the n-grams of all lengths up to `max_n`."""
    return Counter({ngram: c for n in range(1, max_n + 1) for ngram, c in ngram_counts(documents, n).items()})


def most_common(documents: Documents, n: int, most: int) -> list[Ngram]:
    """Return the most common n-grams of one length; of equally common ones the first in token order."""
    counts = ngram_counts(documents, n)
    return sorted(counts, key=lambda ngram: (-counts[ngram], ngram))[:most]


def gain_candidates(documents: Documents, max_n: int, most: int) -> set[Ngram]:
    """Return the n-grams whose gain is computed: the most common ones, and all tokens seen more than once."""
    counts = all_ngrams(documents, max_n)
    pool = {ngram for n in range(1, max_n + 1) for ngram in most_common(documents, n, most)}
    least = sorted(counts[ngram] for ngram in pool)[-most] if most < len(pool) else 0
    return {ngram for ngram in pool if counts[ngram] >= (min(least, 2) if len(ngram) == 1 else least)}


def ngram_gains(
    documents: Documents, candidates: set[Ngram], nodes: int, depth: int, alpha: float, beta: float
) -> dict[Ngram, float]:
    """Return what a drafter loses without each n-gram, as `draftstore.stores.crest.selection` describes it.

    Raises:
        UnclearError: whether an n-gram or its suffix ranks first hangs on the last bits.
    """
    trees = {ngram: paths_of(ngram_tree(documents, ngram, nodes, depth)) for ngram in candidates}
    gains: dict[Ngram, float] = {}
    for ngram in sorted(candidates, key=len):
        weight = document_counts(documents, len(ngram))[ngram]
        trust = weight / (weight + beta * (followers(documents, ngram) if trees[ngram] else 0) + alpha)
        chances = {path: level_prob(level_) for path, level_ in trees[ngram].items()}
        worth = weight * 0.1 ** (len(ngram) - 1)
        gains[ngram] = worth * sum(chances.values())
        for suffix in (ngram[start:] for start in range(1, len(ngram))):
            if suffix not in candidates:
                continue
            lost = worth * trust * sum(chances[path] for path in chances.keys() - trees[suffix].keys())
            if math.isclose(lost, gains[suffix], rel_tol=1e-9) and lost > 1e-9:
                raise UnclearError
            if lost <= gains[suffix]:
                gains[ngram] = lost
                break
    return gains


# -- CREST ---------------------------------------------------------------------------------------------------


def heaviest(chances: dict[Ngram, float], budget: int, max_depth: int, max_level: int) -> Nodes:
    """Return the likeliest paths as a tree: always the best of those whose parents are in it.

    Raises:
        UnclearError: a chance lies on the boundary of two levels.
    """
    levels = {path: level(chance) for path, chance in chances.items() if chance > 0.0}
    waiting = {path for path in levels if levels[path] <= max_level and len(path) <= max_depth}
    placed: dict[Ngram, int] = {(): -1}
    nodes: Nodes = []
    while waiting and len(nodes) < budget:
        ready = [path for path in waiting if path[:-1] in placed]
        best = min(ready, key=lambda path: (levels[path], len(path), path[-1], placed[path[:-1]]))
        waiting.remove(best)
        placed[best] = len(nodes)
        nodes.append((best[-1], placed[best[:-1]], levels[best]))
    return nodes


class Stored(NamedTuple):
    """What a CREST store knows of an n-gram: its tree, its occurrences, the different tokens that follow."""

    tree: Nodes
    occurrences: int
    distinct: int


def crest_draft(
    store: dict[Ngram, Stored], max_n: int, context: Sequence[int], budget: int, max_level: int
) -> tuple[Nodes, int, int]:
    """Draft from the longest stored n-gram that ends the context: its tree, its length, its occurrences."""
    suffixes = [tuple(context[len(context) - n :]) for n in range(min(max_n, len(context)), 0, -1)]
    for suffix in suffixes:
        if suffix in store:
            tree, occurrences, _ = store[suffix]
            return [node for node in tree[:budget] if node[2] <= max_level], len(suffix), occurrences
    return [], 0, 0


# -- acceptance ----------------------------------------------------------------------------------------------


def emitted(
    nodes: Nodes, say: Callable[[Ngram], int], ends: Callable[[Ngram], bool] = lambda _: False
) -> tuple[Ngram, list[int]]:
    """Let a model speak as long as a tree holds what it has said: what it said, and the nodes that held it.

    What ends the text is not counted as held.
    """
    paths = list(paths_of(nodes))
    said: Ngram = ()
    while True:
        said = (*said, say(said))
        if said not in paths or ends(said):
            return said, [paths.index(said[:size]) for size in range(1, len(said))]


# -- recycling -----------------------------------------------------------------------------------------------

Rows = dict[int, list[int]]
"""The candidates of each token, best first; -1 is none."""


def recycled_row(candidates: Sequence[int], vocab_size: int) -> list[int]:
    """Return the row of eight that is kept of some candidates: each once, none outside the vocabulary."""
    first = [*candidates[:8], *[-1] * (8 - len(candidates))]
    return [
        token if 0 <= token < vocab_size and token not in first[:rank] else -1
        for rank, token in enumerate(first)
    ]


def recycle(
    rows: Rows,
    last: int,
    accepted: Sequence[int],
    nodes: Nodes,
    candidates: Sequence[Sequence[int]],
    vocab_size: int,
) -> None:
    """Write the rows of the root and of all nodes; an accepted occurrence of a token wins, then the last one."""
    paths: list[Ngram] = []
    for token, parent, _ in nodes:
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    seen = [((), last), *((path, path[-1]) for path in paths)]
    for accepted_ones in (False, True):
        for (path, token), given in zip(seen, candidates, strict=True):
            row = recycled_row(given, vocab_size)
            if (path == tuple(accepted[: len(path)])) is accepted_ones and row != [-1] * 8:
                rows[token] = row


def guesses_of(rows: Rows, last: int, before: Sequence[int], vocab_size: int) -> list[int]:
    """Return what was held likely one token earlier, by rank, unless it is drafted anyway; else -1."""
    drafted = {last, *rows.get(last, [])}
    return [token if 0 <= token < vocab_size and token not in drafted else -1 for token in before]


def fill_static_tree(
    rows: Rows,
    last: int,
    chances: dict[str, float],
    budget: int,
    max_level: int = 255,
    guesses: Sequence[tuple[int, float]] = (),
) -> Nodes:
    """Look up the tokens of all rank paths, given their chances; keep the likeliest.

    A guess, a token with its chance, is followed by what would follow it as the second candidate.
    """

    def fill(start: Ngram, below: str, scale: float) -> None:
        for path, chance in chances.items():
            tokens = start
            for rank in path[len(below) :]:
                tokens = (*tokens, rows.get(tokens[-1], [-1] * 8)[int(rank)])
            if path.startswith(below) and path != below and -1 not in tokens:
                filled[tokens[1:]] = chance * scale

    filled: dict[Ngram, float] = {}
    fill((last,), "", 1.0)
    for token, chance in guesses:
        if token >= 0:
            filled[(token,)] = chance
            if "1" in chances:
                fill((last, token), "1", chance / chances["1"])
    return heaviest(filled, budget, 63, max_level)


# -- requests ------------------------------------------------------------------------------------------------


def request_tree(text: Sequence[int], rule: HistoryRule, budget: int, max_level: int = 255) -> Nodes:
    """Draw the tree of what followed the last tokens of a text earlier in it."""

    def shares(path: tuple[int, ...], prob: float, floor: float) -> dict[int, float]:
        return request_shares(text, [*text, *path], rule, prob, floor)

    return best_first(shares, rule.depth, rule.floor, budget, max_level)


def request_shares(
    text: Sequence[int], whole: Sequence[int], rule: HistoryRule, prob: float, floor: float
) -> dict[int, float]:
    """Share a probability out to the tokens that may follow `whole`, by what followed its last tokens in `text`.

    Raises:
        UnclearError: the next shorter suffix may or may not be asked.
    """
    read = occurrences_read(text, whole, rule)
    shares: dict[int, float] = {}
    prob *= 1.0 - rule.doubt
    for size in range(rule.max_match, 0, -1):
        after = [text[place + 1] for place, match in read.items() if match >= size]
        if after:
            trust = len(after) / (len(after) + rule.beta * len(set(after)) + rule.alpha / size**2)
            for token, count in Counter(after).items():
                shares[token] = shares.get(token, 0.0) + prob * trust * count / len(after)
            prob -= prob * trust
            if trust < 1.0 and math.isclose(prob, floor, rel_tol=1e-9):
                raise UnclearError
            if prob <= floor:
                break
    return shares


def occurrences_read(text: Sequence[int], whole: Sequence[int], rule: HistoryRule) -> dict[int, int]:
    """Return where the last tokens of `whole` occurred in `text`, and how many of them.

    Of each listed n-gram the last `rows` occurrences are read; a longer one that is listed too is left to its own. A
    negative token ends a document.
    """
    most = min(rule.max_match, len(whole))
    sizes = range(1, most + 1)
    matches = [
        sum(tuple(text[max(place + 1 - size, 0) : place + 1]) == tuple(whole[-size:]) for size in sizes)
        for place in range(len(text) - 1)
    ]
    read: dict[int, int] = {}
    for length, longer in pairwise([*LENGTHS, most + 1]):
        places = [
            place
            for place in reversed(range(len(matches)))
            if matches[place] >= length and text[place + 1] >= 0
        ]
        read |= {place: matches[place] for place in places[: rule.rows] if matches[place] < longer}
    return read


# -- mixtures ------------------------------------------------------------------------------------------------


def mixed_tree(trees: Sequence[Nodes], trusts: Sequence[float], budget: int, max_level: int = 255) -> Nodes:
    """Merge trees: a path goes on unless all trees that say so are wrong, each trusted so far."""
    chances: dict[Ngram, float] = {(): 1.0}
    for path in sorted({path for tree in trees for path in paths_of(tree)}, key=len):
        doubt = 1.0
        for tree, trust in zip(trees, trusts, strict=True):
            doubt *= 1.0 - trust * follows(tree, path)
        chances[path] = chances[path[:-1]] * (1.0 - doubt)
    del chances[()]
    return heaviest(chances, budget, 63, max_level)


def follows(tree: Nodes, path: Ngram) -> float:
    """Return the chance that a path follows what leads to it, by one tree; 0 if the tree does not hold it."""
    levels = {(): 0} | paths_of(tree)
    return level_prob(levels[path] - levels[path[:-1]]) if path in levels else 0.0


def predicted(tree: Nodes, came: Sequence[int]) -> list[tuple[float, int]]:
    """Return, for each place of a text that a tree foretells, how many tokens it expects, and whether one came."""
    seen: list[tuple[float, int]] = []
    said: Ngram = ()
    for token in came:
        children = [path for path in paths_of(tree) if path[:-1] == said]
        if not children:
            break
        said = (*said, token)
        seen.append((sum(follows(tree, path) for path in children), int(said in children)))
        if said not in children:
            break
    return seen


class SlowText:
    """A text whose sources draft one after the other; see `draftstore.drafting.slots`.

    Attributes:
        sources: `draft(budget, min_prob)` and `learn(ids, ...)` of each; None in place of one that has failed.
        seen: expected and correct tokens of each.
        outcomes: nodes of the last draft of each, how many of them came, and why there are none.
    """

    def __init__(self, sources: Sequence[Any], mixed: bool) -> None:
        self.sources: list[Any] = list(sources)
        self.mixed = mixed
        self.seen = [(0.0, 0.0)] * len(sources)
        self.outcomes: list[tuple[int, int, str]] = []
        self._trees: list[Nodes] = []

    def propose(self, budget: int, min_prob: float, max_level: int) -> Nodes:
        """Return the draft; an error of a source that is not mixed is raised, and UnclearError as by `mixed_tree`."""
        self._trees, self.outcomes = [], []
        if budget == 0 or max_level < 0:
            return []
        for place, source in enumerate(self.sources):
            tree: Nodes = []
            try:
                if source is not None:
                    tree = source.draft(budget, 0.0 if self.mixed else min_prob)
                    if not is_tree(tree):
                        raise DraftTreeError
            except Exception:  # noqa: BLE001 (of one source)
                tree = self._fail(place)
            self._trees.append(tree)
            self.outcomes.append((len(tree), 0, self._reason(place, tree)))
        if not self.mixed:
            return self._trees[0]
        trusts = [min(1.0, (came + 3.0) / (expected + 3.0)) for expected, came in self.seen]
        return mixed_tree(self._trees, trusts, budget, max_level)

    def observe(self, ids: Sequence[int], **told: Any) -> None:
        """Learn what came; an error of a source that is not mixed is raised."""
        for place, source in enumerate(self.sources):
            try:
                if source is not None:
                    source.learn(ids, **told)
            except Exception:  # noqa: BLE001 (of one source)
                self._fail(place)
        for place, (drafted, matched, _) in enumerate(self.outcomes):
            self.outcomes[place] = drafted, matched, self._reason(place, drafted)
        for place, tree in enumerate(self._trees if ids else ()):
            for expected, came in predicted(tree, ids):
                self.seen[place] = 0.9 * self.seen[place][0] + expected, 0.9 * self.seen[place][1] + came
            drafted, _, reason = self.outcomes[place]
            self.outcomes[place] = drafted, len(tree_from(tree).accepted(np.array(ids, np.int32))), reason
        if ids:
            self._trees = []

    def _reason(self, place: int, drafted: Any) -> str:
        return "" if drafted else "failed" if self.sources[place] is None else "no_match"

    def _fail(self, place: int) -> Nodes:
        if not self.mixed:
            raise
        self.sources[place] = None
        return []


def is_tree(nodes: Nodes) -> bool:
    """Return whether nodes follow their parents."""
    return all(token >= 0 and -1 <= parent < node for node, (token, parent, _) in enumerate(nodes))


# -- dense stores --------------------------------------------------------------------------------------------


def dense_places(documents: Sequence[Sequence[int]], alike: int = 64) -> list[tuple[int, int]]:
    """Return document and place of every entry of a corpus.

    Two tokens follow. Of each document the entries stay that stand behind the last one that is there already, or whose
    beginning has `alike` entries before.
    """
    known: set[Any] = set()
    staying: Counter[Ngram] = Counter()
    places = []
    for number, document in enumerate(documents):
        closed = [*document, -1]
        beginnings = [tuple(closed[: place + 1]) for place in range(len(closed))]
        entries = [(beginning, tuple(closed[len(beginning) :][:21])) for beginning in beginnings]
        repeated = [entry in known or staying[entry[0]] >= alike for entry in entries]
        first = max((place + 1 for place, there in enumerate(repeated) if there), default=0)
        known.update(entries)
        staying.update(beginnings[first : max(len(document) - 2, 0)])
        places += [(number, place) for place in range(first, len(document) - 2)]
    return places


def rest_of_document(tokens: NDArray[Any], start: int, length: int) -> Ngram:
    """Return the tokens from a place in the corpus of a store, at most `length`, to the end of the document."""
    rest: list[int] = tokens[start : start + length].tolist()
    end = sentinel(tokens.dtype)
    return tuple(rest[: rest.index(end)] if end in rest else rest)


def dense_tree(
    near: Sequence[tuple[float, Ngram]], calibration: Calibration, budget: int, max_level: int = 255
) -> Nodes:
    """Merge the continuations of neighbours, each with its similarity, as the module of dense trees says."""
    weights = [1.0 / (1.0 + (1.0 - similarity) / calibration.reach) for similarity, _ in near]

    def through(path: Ngram) -> float:
        pairs = zip(weights, near, strict=True)
        return sum(weight for weight, (_, rest) in pairs if rest[: len(path)] == path)

    paths = {rest[:size] for _, rest in near for size in range(1, len(rest) + 1)}
    chances: dict[Ngram, float] = {(): 1.0}
    for path in sorted(paths, key=len):
        siblings = sum(through(other) for other in paths if other[:-1] == path[:-1])
        unseen = calibration.unseen * calibration.settled ** (len(path) - 1)
        held = through(path) / (through(path) + calibration.doubt)
        chances[path] = chances[path[:-1]] * held * through(path) / (siblings + unseen)
    del chances[()]
    return heaviest(chances, budget, 63, max_level)


def nearest_entries(
    vectors: NDArray[np.float64], entries: Iterable[int], query: NDArray[np.float64], k: int
) -> list[tuple[int, float]]:
    """Return the entries nearest to a query of some length, each with its cosine: nearest first, equals by number."""
    cosines = {
        entry: float(vectors[entry] @ query / math.sqrt(query @ query * (vectors[entry] @ vectors[entry])))
        for entry in entries
    }
    return sorted(cosines.items(), key=lambda item: (-item[1], item[0]))[:k]


def visited_lists(
    centroids: NDArray[np.float64], sizes: Sequence[int], query: NDArray[np.float64], wanted: float, k: int
) -> set[int]:
    """Return which lists are visited, nearest centroids first, until they hold enough entries."""
    visited: set[int] = set()
    held = 0
    for number in sorted(range(len(sizes)), key=lambda number: -float(centroids[number] @ query)):
        visited.add(number)
        held += sizes[number]
        if held >= max(wanted, k):
            break
    return visited


QUESTIONERS = {"", "developer", "function", "human", "system", "tool", "user"}


def plain_digest(text: str) -> bytes:
    """Return the digest of a plain text, as a document and as a text."""
    return _blake(b"text", text.encode("utf-8", "surrogatepass"))


def turns_digest(turns: Iterable[Sequence[str]]) -> bytes:
    """Return the digest of turns of role, content and all else: BLAKE2b, tagged, of their lengths and texts."""
    coded = [[part.encode("utf-8", "surrogatepass") for part in turn] for turn in turns]
    lines = [" ".join(str(len(part)) for part in turn).encode() + b"\n" + b"".join(turn) for turn in coded]
    return _blake(b"document", b"".join(lines))


def identity_of(content: Any) -> tuple[bytes, bytes | None, bytes | None, tuple[bytes, ...]]:
    """Return the digests of a text or a conversation: document, text, answer, beginnings that end in an answer."""
    if isinstance(content, str):
        return plain_digest(content), plain_digest(content) if content.strip() else None, None, ()
    answers = [place for place, message in enumerate(content, 1) if message["role"] not in QUESTIONERS]
    last = said(content[answers[-1] - 1]).strip() if answers else ""
    beginnings = [content[:place] for place in answers if place < len(content)]
    pairs = [(turns_digest(map(_turn, each)), _text_digest(each)) for each in beginnings]
    known = tuple(digest for pair in pairs if pair[1] is not None for digest in pair if digest is not None)
    answer = _blake(b"answer", last.encode("utf-8", "surrogatepass")) if last else None
    return turns_digest(map(_turn, content)), _text_digest(content), answer, known


def said(message: Any) -> str:
    """Return the text of a turn: its content, then its tool calls as JSON without ids."""
    calls = [without_empty(call["function"]) for call in message.get("tool_calls") or []]
    return (
        "\n".join(filter(None, (message["content"].rstrip(), _json(calls)))) if calls else message["content"]
    )


def _text_digest(messages: Any) -> bytes | None:
    text = "\n".join(map(said, messages))
    return plain_digest(text) if text.strip() else None


def _turn(message: Any) -> tuple[str, str, str]:
    rest = without_empty({key: value for key, value in message.items() if key not in ("role", "content")})
    return message["role"], message["content"], _json(rest) if rest else ""


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))


def _blake(tag: bytes, data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16, person=tag).digest()


def without_empty(value: Any) -> Any:
    """Return a JSON value without keys whose values are null or empty, or become so."""
    if isinstance(value, list):
        return [without_empty(item) for item in value]
    if not isinstance(value, dict):
        return value
    kept = {key: without_empty(item) for key, item in value.items()}
    return {
        key: item
        for key, item in kept.items()
        if not (item is None or (isinstance(item, str | list | dict) and not item))
    }
