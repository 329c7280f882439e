"""`draftstore query`: one draft tree, drawn as text."""

from pathlib import Path
from time import perf_counter_ns
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

from draftstore.cli.common import STORE, Drafting, read_stdin, warm
from draftstore.cli.options import Command, takes
from draftstore.cli.output import json_option, print_json, say
from draftstore.drafting.contexts import ContextDrafter
from draftstore.errors import DraftstoreError, counted
from draftstore.storage.manifest import load_manifest
from draftstore.stores.registry import kind_of
from draftstore.text.tokenizer import TextTokenizer
from draftstore.trees.batch import Draft
from draftstore.trees.tree import DraftTree


@click.command(cls=Command)
@click.argument("directory", type=STORE)
@click.option("--text", required=True, help="Text to continue; - is stdin.")
@takes(drafting=Drafting)
@json_option
def query(directory: Path, text: str, drafting: Drafting, as_json: bool) -> None:
    """Draw the draft tree that a store proposes for a text.

    \b
    Examples:
      draftstore query stores/code --text "for i in range(" --budget 16
      draftstore query stores/code --text - < begun.py
    """
    kind = kind_of(load_manifest(directory).kind)
    if kind.needs_states:
        raise DraftstoreError(
            f"{directory} is a store of kind {kind.name!r}, which drafts from hidden states, not from text: use it "
            "with `draftstore generate --store` or `draftstore replay`"
        )
    drafting.check_strategy([kind.name])
    store, loaded = drafting.open(directory)
    drafter = warm(store.drafter(drafting.strategy_of(store)))
    context = loaded.encode(read_stdin() if text == "-" else text, bos=False)
    contexts = drafter.session(context).slots.contexts
    draft, micros = timed_draft(drafter, contexts, drafting.budget, drafting.min_prob)
    if as_json:
        print_json(
            {
                "context": context.tolist(),
                "context_text": loaded.decode(context),
                "match_length": draft.match_length,
                "match_count": draft.match_count,
                "lookup_us": round(micros, 1),
                "nodes": _nodes(draft.tree, loaded),
            }
        )
    elif len(draft.tree):
        say(describe(draft, loaded.decode(context[len(context) - draft.match_length :]), micros))
        say(draw_tree(draft.tree, loaded))
    else:
        say(f"no draft: {_why_none(draft, context, drafting)} ({micros:.0f} µs)")


def _why_none(draft: Draft, context: NDArray[np.int32], drafting: Drafting) -> str:
    if drafting.budget == 0:
        return "the budget is 0"
    if len(context) == 0:
        return "the text is empty"
    if draft.match_length and drafting.min_prob:
        return f"no continuation of this text has a probability of at least {drafting.min_prob:g}"
    return "the store has no continuation of this text"


def timed_draft(
    drafter: ContextDrafter, contexts: NDArray[np.int32], budget: int, min_prob: float = 0.0
) -> tuple[Draft, float]:
    """Draft for one context; return the draft and the duration of the lookup in microseconds.

    The second of two lookups is timed: the first may wait for the disk, which lookups in a warm store do not.
    """
    for _ in range(2):
        begin = perf_counter_ns()
        draft = drafter.draft(contexts, budget, min_prob)[0]
        micros = (perf_counter_ns() - begin) / 1000
    return draft, micros


def _nodes(tree: DraftTree, tokenizer: TextTokenizer) -> list[dict[str, Any]]:
    """Return the nodes as JSON values; the exact text of a partial character is null."""
    rows = zip(tree.tokens.tolist(), tree.parents.tolist(), tree.probs.tolist(), strict=True)
    return [
        {
            "token": token,
            "text": tokenizer.exact_text(token),
            "shown": tokenizer.token_text(token),
            "parent": parent,
            "prob": round(prob, 6),
        }
        for token, parent, prob in rows
    ]


def describe(draft: Draft, matched: str, micros: float) -> str:
    """Describe a draft in one line."""
    return (
        f"{counted(len(draft.tree), 'node')} in {micros:.0f} µs; longest match "
        f"{counted(draft.match_length, 'token')}, {counted(draft.match_count, 'time')}: {matched!r}"
    )


def draw_tree(tree: DraftTree, tokenizer: TextTokenizer) -> str:
    """Draw a draft tree as lines; a run without branches takes one line, with its first and last probabilities.

    0.600…0.300  ␣cat·␣sat
    ├─ 0.250  ␣on
    └─ 0.050  ␣down
    0.100  ␣dog
    """
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
        text = "·".join(tokenizer.token_text(tokens[item]) for item in run)
        lines.append(f"{lead}{probs[node]:.3f}{until}  {text}")
        grown = children.get(run[-1], [])
        for child in reversed(grown):
            last = child == grown[-1]
            to_draw.append((below + ("└─ " if last else "├─ "), below + ("   " if last else "│  "), child))
    return "\n".join(lines)
