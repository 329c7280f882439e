"""Draft trees as plain text, for people and for SQL."""

from functools import cache

from draftstore.text.tokenizer import TextTokenizer
from draftstore.trees.tree import DraftTree


class TreeText:
    """Draws draft trees.

        0.600…0.300  ␣cat·␣sat
        ├─ 0.250  ␣on
        └─ 0.050  ␣down
        0.100  ␣dog

    A run without branches takes one line, with its first and last probabilities.
    """

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._token_text = cache(tokenizer.token_text)

    def draw(self, tree: DraftTree) -> str:
        """Return a tree as lines, without a trailing newline."""
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(tree.parents.tolist()):
            children.setdefault(parent, []).append(node)
        probs, tokens = tree.probs.tolist(), tree.tokens.tolist()
        lines = []
        to_draw = [("", "", node) for node in reversed(children.get(-1, []))]
        while to_draw:
            lead, below, node = to_draw.pop()
            run = [node]
            while len(children.get(run[-1], [])) == 1:
                run.append(children[run[-1]][0])
            until = f"…{probs[run[-1]]:.3f}" if len(run) > 1 else ""
            text = "·".join(self._token_text(tokens[item]) for item in run)
            lines.append(f"{lead}{probs[node]:.3f}{until}  {text}")
            grown = children.get(run[-1], [])
            for child in reversed(grown):
                last = child == grown[-1]
                to_draw.append(
                    (below + ("└─ " if last else "├─ "), below + ("   " if last else "│  "), child)
                )
        return "\n".join(lines)
