"""`draftstore query`: a drawing of one draft."""

from pathlib import Path
from time import perf_counter_ns
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray
from rich.text import Text
from rich.tree import Tree

from draftstore.cli.common import (
    STORE,
    check_strategy,
    drafting_options,
    json_option,
    open_store,
    print_json,
    stdout_console,
    strategy_of,
    warm,
)
from draftstore.drafting.drafter import StoreDrafter
from draftstore.errors import DraftstoreError, counted
from draftstore.storage.manifest import load_manifest
from draftstore.stores.registry import kind_of
from draftstore.text.tokenizer import TextTokenizer
from draftstore.trees.batch import Draft
from draftstore.trees.tree import DraftTree


@click.command()
@click.argument("directory", type=STORE)
@click.option("--text", required=True, help="Text to continue.")
@drafting_options
@json_option
def query(
    directory: Path,
    text: str,
    budget: int,
    min_prob: float,
    strategy: str | None,
    backend: str | None,
    tokenizer: str | None,
    as_json: bool,
) -> None:
    """Draw the draft tree that a store proposes after a text.

    \b
    Example:
      draftstore query stores/code --text "for i in range(" --budget 16
    """
    kind = kind_of(load_manifest(directory).kind)
    if kind.needs_states:
        raise DraftstoreError(
            f"{directory} is a store of kind {kind.name!r}, which drafts from hidden states and not from text: use it "
            "with `draftstore generate --store` or `draftstore replay`"
        )
    check_strategy(strategy, [kind.name])
    store, loaded = open_store(directory, tokenizer, backend)
    drafter = warm(store.drafter(strategy_of(store, strategy)))
    context = loaded.encode(text, bos=False)
    contexts = drafter.session(context).context
    draft, micros = timed_draft(drafter, contexts, budget, min_prob)
    matched = context[len(context) - draft.match_length :]
    if as_json:
        print_json(
            {
                "context": context.tolist(),
                "context_text": loaded.decode(context),
                "match_length": draft.match_length,
                "match_count": draft.match_count,
                "lookup_us": round(micros, 1),
                "nodes": node_list(draft.tree, loaded),
            }
        )
        return
    console = stdout_console()
    if not len(draft.tree):
        console.print(f"no draft: {_why_none(draft, context, budget, min_prob)} ({micros:.0f} µs)")
    else:
        console.print(describe(draft, loaded.decode(matched), micros))
        console.print(draw(draft.tree, loaded, "…"))


def _why_none(draft: Draft, context: NDArray[np.int32], budget: int, min_prob: float) -> str:
    """Say why there is no draft."""
    if budget == 0:
        return "budget 0 asks for no draft"
    if len(context) == 0:
        return "the text is empty"
    if draft.match_length and min_prob:
        return f"no continuation of this text has a probability of {min_prob:g} or more"
    return "the store holds no continuation of this text"


def timed_draft(
    drafter: StoreDrafter, contexts: NDArray[np.int32], budget: int, min_prob: float = 0.0
) -> tuple[Draft, float]:
    """Draft for one context; return the draft and the lookup's duration in microseconds.

    The second of two lookups is timed: the first may wait for the disk, unlike in a store in use.
    """
    for _ in range(2):
        begin = perf_counter_ns()
        draft = drafter.draft(contexts, budget, min_prob)[0]
        micros = (perf_counter_ns() - begin) / 1000
    return draft, micros


def node_list(tree: DraftTree, tokenizer: TextTokenizer) -> list[dict[str, Any]]:
    """Return the nodes as JSON values: token id, exact text, visible text, parent and probability.

    The exact text is null for a part of a character.
    """
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


def draw(tree: DraftTree, tokenizer: TextTokenizer, root: str) -> Tree:
    """Draw a draft tree; a run without branches takes one line, with its first and last probability."""
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(tree.parents.tolist()):
        children.setdefault(parent, []).append(node)
    probs = np.round(tree.probs, 3)
    drawing = Tree(root, guide_style="dim")
    open_branches = [(drawing, node) for node in reversed(children.get(-1, []))]
    while open_branches:
        branch, node = open_branches.pop()
        run = [node]
        while len(children.get(run[-1], [])) == 1:
            run.append(children[run[-1]][0])
        label = Text(f"{probs[run[0]]:.3f}", "cyan")
        if len(run) > 1:
            label.append(f"…{probs[run[-1]]:.3f}", "dim cyan")
        label.append("  ")
        for position, item in enumerate(run):
            label.append("·" if position else "", "dim")
            label.append(tokenizer.token_text(int(tree.tokens[item])))
        grown = branch.add(label)
        open_branches += [(grown, child) for child in reversed(children.get(run[-1], []))]
    return drawing
