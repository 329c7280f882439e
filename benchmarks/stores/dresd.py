"""DReSD compared with REST and CREST on a real model: `python -m benchmarks.stores.dresd`.

SmolLM2-135M-Instruct; stores of Alpaca instructions with answers of another model (`other`) and with the model's own
greedy answers (`own`). Greedy answers to 100 AlpacaEval instructions in neither store are replayed with the hidden
states that predicted their tokens, as in live decoding. Texts and stores are made once, in the work folder. Besides M,
there is the *acceptance* of the DReSD paper: accepted tokens per pass divided by the length of a draft, averaged over
prompts.

Tables first; the last line of stdout is one JSON document, also written to OUT/dresd.json.

Example:
    DRAFTSTORE_TEST_DATA=~/data python -m benchmarks.stores.dresd --work ~/bench --corpus-dtype bfloat16
"""

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.common import RecordingSet, Workspace, add_arguments, evenly, open_workspace, write_records
from benchmarks.measure import percentiles, progress
from benchmarks.report import describe_machine, finish, show_table
from benchmarks.smollm import add_model_argument, smollm
from draftstore.answers.responses import ResponseOptions, make_responses
from draftstore.decoding.replay import Recording, read_recordings, replay
from draftstore.drafting.contexts import ContextDrafter
from draftstore.drafting.drafter import Drafter
from draftstore.drafting.mixture import Mixture
from draftstore.drafting.request import RequestDrafter
from draftstore.hf.loading import DTYPES, LoadedModel, load_model
from draftstore.hf.states import ModelStates, with_states
from draftstore.stores.crest.build import CrestOptions, build_crest
from draftstore.stores.crest.store import CrestStore
from draftstore.stores.dresd.build import DresdOptions, build_dresd
from draftstore.stores.dresd.store import DresdStore
from draftstore.stores.rest.build import RestOptions, build_rest
from draftstore.stores.rest.store import RestStore
from draftstore.text.records import read_json_records
from draftstore.text.tokenizer import TextTokenizer
from draftstore.trees.batch import DraftBatch
from draftstore.trees.frontier import MAX_BUDGET
from draftstore.trees.tree import DraftTree

OTHER, OWN = "other", "own"
INSTRUCTIONS = "chat_instruct_mix.jsonl.zst"
INSTRUCTION_SOURCE = "alpaca_random_9k"
EVALUATED = RecordingSet("alpaca_eval.jsonl.zst", "vicuna-7b-v1.5")
LONGEST = 256
"""Maximum tokens of an instruction in the chat template."""
DRAFTS, LENGTH = 10, 10
"""The paper's shape: number of drafts, and tokens of each."""
NODES = 64
BATCH = 128


@dataclasses.dataclass(frozen=True)
class Extent:
    """Instructions in the stores, instructions to answer, tokens of an answer, n-grams of CREST."""

    prompts: int = 3500
    tests: int = 100
    tokens: int = 128
    ngrams: int = 100_000


QUICK = Extent(prompts=40, tests=4, tokens=24, ngrams=1_000)


def make_corpora(
    space: Workspace, loaded: LoadedModel, model: Path, extent: Extent, dtype: str
) -> dict[str, Path]:
    """Return the texts of the stores; the model's own answers are made with weights of type `dtype`."""
    folder = space.work / "corpora"
    other = folder / f"dresd_{extent.prompts}.jsonl"
    if not other.exists():
        write_records(other, _instructions(space, loaded.text, extent.prompts))
    own = folder / f"dresd_{extent.prompts}_greedy_{dtype}.jsonl"
    return {OTHER: other, OWN: _answer(other, model, own, extent, dtype)}


def _instructions(space: Workspace, tokenizer: TextTokenizer, count: int) -> list[dict[str, Any]]:
    """Return evenly sampled, distinct instructions with their answers by another model."""
    found: dict[str, dict[str, Any]] = {}
    for _, record in read_json_records(space.data / "corpora" / INSTRUCTIONS):
        if record["id"].startswith(INSTRUCTION_SOURCE) and len(record["messages"]) == 2:
            found.setdefault(record["messages"][0]["content"], record)

    def tokens(record: dict[str, Any]) -> int:
        text = tokenizer.render_chat(record["messages"][:1], add_generation_prompt=True)
        return len(tokenizer.encode(text, bos=True))

    return evenly([record for record in found.values() if tokens(record) <= LONGEST], count)


def _answer(prompts: Path, model: Path, out: Path, extent: Extent, dtype: str) -> Path:
    """Return a file of the model's greedy answers, resuming an interrupted run."""
    progress(f"answers {out.name}")
    options = ResponseOptions(prompts=(prompts,), max_tokens=extent.tokens)
    return make_responses(options, model, out, dtype=dtype, batch=BATCH).path


def make_recordings(space: Workspace, loaded: LoadedModel, model: Path, extent: Extent) -> list[Recording]:
    """Return the model's answers to evenly sampled AlpacaEval instructions, with hidden states."""
    tests = space.work / "corpora" / f"dresd_tests_{extent.tests}.jsonl"
    if not tests.exists():
        records = [record for _, record in read_json_records(space.data / "replays" / EVALUATED.file)]
        wanted = [record for record in records if record["model"] == EVALUATED.model]
        chosen = evenly(wanted, extent.tests)
        write_records(tests, ({"id": record["id"], "prompt": record["prompt"]} for record in chosen))
    answers = _answer(tests, model, tests.with_name(f"{tests.stem}_greedy.jsonl"), extent, "float32")
    return list(with_states(loaded.model, read_recordings(answers, loaded.text)))


def drafters_of(
    space: Workspace, corpus: Path, tokenizer: TextTokenizer, source: ModelStates, ngrams: int
) -> tuple[dict[str, tuple[Drafter, int]], dict[str, Any]]:
    """Return drafters of the stores of a corpus with their maximum nodes, and a description of the dense store."""
    folder, name = space.work / "stores", corpus.stem
    progress(f"stores of {name}")
    rest = RestStore.open(
        build_rest(RestOptions(corpus=(corpus,), name=name), tokenizer, folder / f"{name}-rest").path
    )
    options = CrestOptions(name=f"{name}-crest", ngrams=ngrams)
    crest = CrestStore.open(build_crest(options, rest.path, folder / f"{name}-crest-{ngrams}").path)
    path = folder / f"{name}-dresd"
    build_dresd(DresdOptions(corpus=(corpus,), name=path.name), tokenizer, source, path)
    dense = DresdStore.open(path, target_model=source.name, tokenizer=tokenizer.identity)
    backoff, near = rest.drafter("backoff"), dense.drafter()
    request = RequestDrafter(tokenizer.vocab_size)
    shape = f"{DRAFTS} of {LENGTH} tokens"
    drafters: dict[str, tuple[Drafter, int]] = {
        f"REST, longest: {shape}": (Paths(rest.drafter("longest", depth=LENGTH), DRAFTS), MAX_BUDGET),
        f"DReSD: {shape}": (dense.drafter("wide", drafts=DRAFTS, length=LENGTH), MAX_BUDGET),
        "REST, longest": (rest.drafter("longest"), NODES),
        "CREST, backoff": (crest.drafter(), NODES),
        "REST, backoff": (backoff, NODES),
        "DReSD, many": (near, NODES),
        "REST backoff and request": (Mixture([request, backoff]), NODES),
        "the same and DReSD": (Mixture([request, backoff, near]), NODES),
    }
    manifest = dense.manifest
    about = {key: manifest.parameters[key] for key in ("explained_variance", "quality")}
    return drafters, about | {"counts": manifest.counts, "bytes": manifest.size}


class Paths(ContextDrafter):
    """The likeliest paths of another drafter: a text store in the shape of a dense one."""

    def __init__(self, drafter: ContextDrafter, drafts: int) -> None:
        """Keep so many paths of the proposals of `drafter`."""
        self._drafter, self._drafts, self.hidden_size = drafter, drafts, 0
        self.context_size, self.vocab_size = drafter.context_size, drafter.vocab_size

    def draft_batch(
        self, contexts: NDArray[np.int32], budget: int = 64, min_prob: float = 0.0, hidden: object = None  # noqa: ARG002
    ) -> DraftBatch:  # fmt: skip
        """Draft for a batch of contexts; see `ContextDrafter.draft_batch`."""
        drafts = self._drafter.draft(contexts, MAX_BUDGET, min_prob)
        trees = [_best_paths(draft.tree, self._drafts).prefix(budget) for draft in drafts]
        return DraftBatch.of(
            [
                (tree.tokens, tree.parents, tree.levels, draft.match_length, draft.match_count)
                for tree, draft in zip(trees, drafts, strict=True)
            ]
        )


def _best_paths(tree: DraftTree, count: int) -> DraftTree:
    """Return the paths to the likeliest leaves of a tree."""
    parents = tree.parents.tolist()
    leaves = [node for node in range(len(tree)) if node not in set(parents)][:count]
    order = sorted({node for leaf in leaves for node in tree.path(leaf)})
    places = {node: place for place, node in enumerate(order)} | {-1: -1}
    above = np.array([places[parents[node]] for node in order], np.int16)
    return DraftTree(tree.tokens[order], above, tree.levels[order])


def measure(drafter: Drafter, recordings: Sequence[Recording], budget: int) -> dict[str, Any]:
    """Replay recordings with hidden states, one by one: acceptance is a mean over them."""
    replay(drafter, recordings[:1], budget=budget)  # compiles what it needs
    results = [replay(drafter, [each], budget=budget) for each in recordings if len(each.output) > 1]
    passes = sum(each.passes for each in results)
    times = percentiles(np.concatenate([each.lookup_ns for each in results]) / 1000)
    return {
        "accepted_length": round(sum(each.tokens for each in results) / passes, 4),
        "acceptance": round(
            100 * float(np.mean([each.accepted / each.passes for each in results])) / LENGTH, 2
        ),
        "nodes": round(sum(each.drafted for each in results) / passes, 2),
        "lookup_us": {"p50": times["p50"], "p99": times["p99"]},
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every drafter with both stores and finish with the JSON document."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stores.dresd", description=__doc__)
    add_arguments(parser)
    add_model_argument(parser)
    parser.add_argument(
        "--corpus-dtype", choices=DTYPES, default="float32",
        help="of the weights that answer and read the texts of stores (default: %(default)s); bfloat16 is three times "
        "as fast on CPUs that know it",
    )  # fmt: skip
    args = parser.parse_args(arguments)
    extent, dtype = QUICK if args.quick else Extent(), args.corpus_dtype
    document = describe_machine(("torch", "transformers")) | {"quick": args.quick, "corpus_dtype": dtype}
    with open_workspace(args) as space:
        model = smollm(space, args.model)
        loaded = load_model(model, dtype="float32")
        recordings = make_recordings(space, loaded, model, extent)
        corpora = make_corpora(space, loaded, model, extent, dtype)
        source = ModelStates(loaded if dtype == "float32" else load_model(model, dtype=dtype))
        for name, corpus in corpora.items():
            drafters, about = drafters_of(space, corpus, loaded.text, source, extent.ngrams)
            found = {label: measure(each, recordings, budget) for label, (each, budget) in drafters.items()}
            rows = [
                [
                    label,
                    *(row[key] for key in ("accepted_length", "acceptance", "nodes")),
                    row["lookup_us"]["p50"],
                ]
                for label, row in found.items()
            ]
            columns = ["drafts", "M", "acceptance %", "nodes a pass", "p50 µs"]
            show_table(f"greedy answers, stores of {name} answers", columns, rows)
            document[name] = {"store": about, "drafters": found}
    finish(args.out, "dresd", document)


if __name__ == "__main__":
    main()
