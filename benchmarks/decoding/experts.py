"""Experts that drafts touch, and what the planner then chooses: `python -m benchmarks.decoding.experts`.

A pass of a mixture-of-experts model reads the weights of every expert that any row selects. Drafts from a store of
ShareGPT and the request, over recorded outputs of Vicuna-7B, go through Mixtrals with random weights: 8 experts, 2 a
row. Their routers say which experts the rows of one or several texts touch together, by number of nodes:

token     large embeddings: a row's experts depend on its token, so only equal tokens share them
context   embeddings as small as other weights: layers add what the rows of a text have in common
uniform   computed, not run: every row selects anew

Curves are modelled, in passes over one row of one text. A pass reads shared weights and those of the experts touched;
experts are --share of the bytes of one row, by default as in Mixtral 8x7B. Weights with more rows than --ridge take
the time of their arithmetic. The dense model reads all weights in every pass. Caches and drafting are left out. Then
the outputs are replayed in full batches, with a planner for each curve, and speed-ups modelled over plain decoding of
the same batch.

Tables first; the last line of stdout is one JSON document, also written to OUT/experts.json.

Examples:
    DRAFTSTORE_TEST_DATA=~/data python -m benchmarks.decoding.experts --work ~/bench
    DRAFTSTORE_TEST_DATA=~/data python -m benchmarks.decoding.experts --store ~/stores/chat --share 0.8
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import MixtralConfig, MixtralModel

from benchmarks.common import CHAT, SEED, TINY, VICUNA, add_arguments, evenly, open_workspace
from benchmarks.measure import progress
from benchmarks.report import describe_machine, finish, show_rows
from draftstore.decoding.acceptance import Acceptance
from draftstore.decoding.budget import CostPlanner, Fixed
from draftstore.decoding.curve import CostCurve
from draftstore.decoding.loop import RowByRow, Step, Text, decode, step
from draftstore.decoding.replay import RecordedModel, Recording
from draftstore.drafting.drafter import Drafter
from draftstore.drafting.mixture import Mixture
from draftstore.drafting.request import RequestDrafter
from draftstore.drafting.slots import Slots, start
from draftstore.stores.rest.store import RestStore
from draftstore.trees.batch import DraftBatch
from draftstore.trees.frontier import MAX_BUDGET
from draftstore.trees.tree import DraftTree

EXPERTS, SELECTED, LAYERS, HIDDEN = 8, 2, 4, 128
NODES, SHOWN, TEXTS = 63, (0, 1, 2, 4, 8, 16, 32, 63), (1, 8, 32)
PASSES, DRAWS, CONTEXT = 8, 200, 128
"""Passes of each output that are counted, batches drawn from them, and tokens before a draft that the model reads."""
EMBEDDINGS = {"token": 1.0, "context": 0.02}
"""Standard deviation of the embeddings; that of all other weights is 0.02."""
SHARE, RIDGE = 0.88, 200.0
"""Mixtral 8x7B reads 12.7 billion weights for a row, 11.3 from experts; an H200 computes 206 rows in that time."""


def make_model(vocab_size: int, deviation: float) -> Any:
    """Return a Mixtral without a head, with random weights."""
    torch.manual_seed(SEED)
    config = MixtralConfig(
        vocab_size=vocab_size, hidden_size=HIDDEN, intermediate_size=HIDDEN, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=4, num_local_experts=EXPERTS, num_experts_per_tok=SELECTED,
    )  # fmt: skip
    model: Any = MixtralModel(config)
    torch.nn.init.normal_(model.embed_tokens.weight, std=deviation)
    return model.eval()


def draft(drafter: Drafter, recording: Recording) -> list[tuple[NDArray[np.int32], DraftTree]]:
    """Return the ids before a draft, the last ones, and the draft, for some passes over an output."""
    recorded, size, drafts = RecordedModel(recording.output), 1, []
    text = Text(start(drafter, [*recording.prompt, recording.output[0]]), Fixed(NODES), recorded.ends)
    for done in decode(recorded, text):
        drafts.append((np.concatenate([recording.prompt, recording.output[:size]])[-CONTEXT:], done.tree))
        size += len(done.tokens)
    return evenly(drafts, PASSES)


def touched(model: Any, context: NDArray[np.int32], tree: DraftTree) -> NDArray[np.bool_]:
    """Return bool [NODES + 1, LAYERS, EXPERTS], the experts of a text's last token and the first 0, 1, ... nodes."""
    before, size = len(context) - 1, len(context) + len(tree)
    mask = torch.ones(size, size, dtype=torch.bool).tril()
    mask[before:, before:] = torch.from_numpy(tree.attention_mask())
    ids = torch.from_numpy(np.concatenate([context, tree.tokens])).long()[None]
    places = torch.cat([torch.arange(before), before + torch.from_numpy(tree.position_offsets())])[None]
    with torch.inference_mode():
        passed = model(ids, attention_mask=mask[None, None], position_ids=places, output_router_logits=True)
    chosen = torch.stack(passed.router_logits)[:, before:].topk(SELECTED).indices.numpy().swapaxes(0, 1)
    found = np.zeros((NODES + 1, LAYERS, EXPERTS), np.bool_)
    np.put_along_axis(found[: len(chosen)], chosen, values=True, axis=-1)
    return np.logical_or.accumulate(found)


def draw_batches(counted: Sequence[Sequence[NDArray[np.bool_]]], texts: int) -> NDArray[np.float64]:
    """Return float64 [NODES + 1], the mean experts of a layer that random passes of different texts touch together."""
    rng, total = np.random.default_rng(SEED), np.zeros(NODES + 1)
    for _ in range(DRAWS):
        batch = [counted[place] for place in rng.choice(len(counted), texts, replace=False)]
        together = np.logical_or.reduce([passes[int(rng.integers(len(passes)))] for passes in batch])
        total += together.sum(-1).mean(-1)
    return total / DRAWS


def curve_of(texts: int, experts: NDArray[np.float64] | None, share: float, ridge: float) -> CostCurve:
    """Return the cost of a pass by rows, for 0, 1, ... nodes of each text; `experts`: those touched, None if dense."""
    rows = texts * np.arange(1, NODES + 2)
    seconds = np.maximum(1, rows / ridge)
    if experts is not None:
        routed = experts / SELECTED * np.maximum(1, rows * SELECTED / experts / ridge)
        seconds = (1 - share) * seconds + share * routed
    first = (1,) * (texts > 1)  # curves begin with one row
    return CostCurve((*first, *rows.tolist()), (*first, *seconds.tolist()))


class Batch:
    """The `Model` of several recorded outputs."""

    def __init__(self, models: Sequence[RecordedModel]) -> None:
        self._models = models

    def room(self) -> int:
        """Return that drafts may have any size."""
        return MAX_BUDGET

    def verify(self, drafts: DraftBatch) -> RowByRow:
        """Return the verdicts of all texts."""
        for place, model in enumerate(self._models):
            model.verify(drafts.part([place]))
        return RowByRow(self._models)

    def keep(self, accepted: Sequence[Acceptance | None]) -> None:
        """Advance each text."""
        for model, each in zip(self._models, accepted, strict=True):
            model.keep([each])


def replay_full(
    drafter: Drafter, recordings: Sequence[Recording], texts: int, curve: CostCurve
) -> tuple[int, list[int]]:
    """Return tokens, and the nodes of a text in each pass, for as long as there are outputs to fill the batch."""
    slots, waiting, tokens, nodes = Slots(), iter(recordings), 0, list[int]()
    active: list[tuple[RecordedModel, Text]] = []
    while True:
        while len(active) < texts and (recording := next(waiting, None)):
            model = RecordedModel(recording.output)
            session = start(drafter, [*recording.prompt, recording.output[0]], slots=slots)
            active.append((model, Text(session, CostPlanner(curve, NODES), model.ends)))
        if len(active) < texts:
            return tokens, nodes
        results = step([text for _, text in active], Batch([model for model, _ in active]))
        steps = [done for done in results if isinstance(done, Step)]
        if len(steps) < len(results):
            raise AssertionError(f"a text failed: {results}")
        tokens += sum(len(done.tokens) for done in steps)
        nodes.append(max(len(done.tree) for done in steps))
        for _, text in active:
            if text.over:
                slots.leave(text.session.slot)
        active = [each for each in active if not each[1].over]


def main() -> None:
    """Count, model, replay, and finish with the JSON document."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decoding.experts", description=__doc__)
    add_arguments(parser)
    parser.add_argument("--store", type=Path, help="a REST store with the tokenizer llama2 (default: built)")
    parser.add_argument("--outputs", type=int, help="recorded outputs (default: 96; 33 with --quick)")
    parser.add_argument(
        "--share", type=float, default=SHARE, help="of experts, see above (default: %(default)s)"
    )
    parser.add_argument(
        "--ridge", type=float, default=RIDGE, help="in rows, see above (default: %(default)s)"
    )
    args = parser.parse_args()
    args.outputs = args.outputs or (33 if args.quick else 96)
    if args.outputs < max(TEXTS):
        parser.error(f"a batch has {max(TEXTS)} texts: expected as many outputs, not {args.outputs}")
    touching, planned = list[dict[str, Any]](), list[dict[str, Any]]()
    with open_workspace(args) as space:
        store = RestStore.open(args.store) if args.store else space.store(TINY if args.quick else CHAT)
        outputs = [each for each in space.recordings(VICUNA) if len(each.output) > 1]
        outputs = evenly(outputs, args.outputs)
        vocab_size = space.tokenizer.vocab_size
        drafter = Mixture([RequestDrafter(vocab_size), store.drafter()])
        progress(f"drafts of {len(outputs)} outputs, and their experts")
        drafts = [draft(drafter, output) for output in outputs]
        counted = {}
        for name, deviation in EMBEDDINGS.items():
            model = make_model(vocab_size, deviation)
            counted[name] = [[touched(model, *each) for each in passes] for passes in drafts]
        for texts in TEXTS:
            experts = {name: draw_batches(passes, texts) for name, passes in counted.items()}
            curves = {"dense": curve_of(texts, None, args.share, args.ridge)}
            curves |= {name: curve_of(texts, each, args.share, args.ridge) for name, each in experts.items()}
            costs = {name: curve.costs(texts, NODES + 1) for name, curve in curves.items()}
            for nodes in SHOWN:
                line: dict[str, Any] = {"texts": texts, "nodes": nodes}
                line |= {f"experts_{name}": round(each[nodes], 3) for name, each in experts.items()}
                uniform = EXPERTS * (1 - (1 - SELECTED / EXPERTS) ** (texts * (nodes + 1)))
                line["experts_uniform"] = round(uniform, 3)
                touching.append(
                    line | {f"cost_{name}": round(each[nodes] / each[0], 3) for name, each in costs.items()}
                )
            for name, curve in curves.items():
                progress(f"texts {texts}, planned for {name}")
                tokens, chosen = replay_full(drafter, outputs, texts, curve)
                line = {"texts": texts, "planned_for": name, "nodes": round(float(np.mean(chosen)), 2)}
                line["passes_with_nodes"] = round(float(np.mean(np.array(chosen) > 0)), 3)
                line["accepted_length"] = round(tokens / texts / len(chosen), 3)
                line |= {
                    f"speedup_{name}": round(float(tokens / texts * each[0] / each[chosen].sum()), 3)
                    for name, each in costs.items()
                }
                planned.append(line)
        stored = store.manifest.counts["tokens"]
    show_rows("Experts of a layer, and cost of a pass relative to plain decoding of the same batch", touching)
    show_rows(f"Planned for each curve: a store of {stored:,} tokens and the request", planned)
    about = describe_machine(["torch", "transformers"]) | {"quick": args.quick, "store_tokens": stored}
    about |= {"outputs": len(outputs), "share": args.share, "ridge": args.ridge}
    finish(args.out, "experts", about | {"touched": touching, "planned": planned})


if __name__ == "__main__":
    main()
