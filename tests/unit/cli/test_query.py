"""Trees drawn as text."""

import numpy as np

from draftstore.cli.query import draw_tree
from draftstore.text.tokenizer import TextTokenizer
from draftstore.trees.tree import LEVEL_PROBS, DraftTree


def test_a_tree(small_tokenizer: TextTokenizer) -> None:
    ids = [int(small_tokenizer.encode(letter, bos=False)[0]) for letter in "abcdefgh"]
    parents, levels = [-1, 0, 1, 1, 2, 2, 4, -1], [0, 16, 32, 48, 64, 80, 96, 112]
    tree = DraftTree(np.array(ids, np.int32), np.array(parents, np.int16), np.array(levels, np.uint8))
    assert LEVEL_PROBS[16] == 0.5
    assert draw_tree(tree, small_tokenizer).splitlines() == [
        "1.000…0.500  a·b",
        "├─ 0.250  c",
        "│  ├─ 0.062…0.016  e·g",
        "│  └─ 0.031  f",
        "└─ 0.125  d",
        "0.008  h",
    ]
