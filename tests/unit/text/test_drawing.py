"""Trees drawn as text."""

import re

import numpy as np

from draftstore.text.drawing import TreeText
from draftstore.text.tokenizer import TextTokenizer
from draftstore.trees.tree import LEVEL_PROBS, DraftTree


def test_a_tree(small_tokenizer: TextTokenizer) -> None:
    a, b, c, d, e, f = (int(small_tokenizer.encode(letter, bos=False)[0]) for letter in "abcdef")
    tree = DraftTree(
        np.array([a, b, c, d, e, f], np.int32),
        np.array([-1, 0, 1, 1, 2, -1], np.int16),
        np.array([0, 16, 32, 48, 64, 80], np.uint8),
    )
    assert LEVEL_PROBS[16] == 0.5
    expected = ["1.000…0.500  a·b", "├─ 0.250…0.062  c·e", "└─ 0.125  d", "0.031  f"]
    assert TreeText(small_tokenizer).draw(tree).splitlines() == expected


def test_branches_below_branches(small_tokenizer: TextTokenizer) -> None:
    ids = [int(small_tokenizer.encode(letter, bos=False)[0]) for letter in "abcdef"]
    parents = np.array([-1, 0, 0, 1, 1, 3], np.int16)
    tree = DraftTree(np.array(ids, np.int32), parents, np.arange(6, dtype=np.uint8))
    lines = TreeText(small_tokenizer).draw(tree).splitlines()
    drawn = [re.sub(r"[0-9.…]+  ", "", line) for line in lines]
    assert drawn == ["a", "├─ b", "│  ├─ d·f", "│  └─ e", "└─ c"]
