"""The chain of a tree: the most promising path, by comparing all of them."""

from hypothesis import given
from hypothesis import strategies as st

from draftstore.trees.tree import DraftTree, best_chain
from tests.unit.trees.test_tree import trees


@given(trees(12), st.integers(0, 7) | st.none())
def test_no_other_path_promises_more(tree: DraftTree, longest: int | None) -> None:
    chain = best_chain(tree, longest)
    chain.validate()
    assert chain.parents.tolist() == list(range(-1, len(chain) - 1))
    depth = len(tree) if longest is None else longest
    cut = [path[:depth] for path in map(tree.path, range(len(tree)))]
    sums = [float(tree.probs[path].sum(dtype=float)) for path in cut if path]
    assert abs(float(chain.probs.sum(dtype=float)) - max(sums, default=0.0)) < 1e-6
    assert chain.tokens.tolist() in [tree.tokens[path].tolist() for path in cut] or not len(chain)
