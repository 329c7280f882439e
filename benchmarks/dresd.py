"""DReSD beside REST and CREST on a real model: `python -m benchmarks.dresd`.

SmolLM2-135M-Instruct; stores of Alpaca instructions with answers of another model (out of distribution, `ood`), with
the model's own greedy answers (`id`), and with its samples (`sampled`); 100 AlpacaEval instructions that none of them
holds, at most 128 new tokens. A replay of a recorded output with the hidden states that predicted its tokens is what
live decoding gives, so every shape is measured on the same outputs. Parts, each a table:

- stores: bytes an entry, build rate, explained variance, MRR, recall against exact search within the group;
- matched: REST as published (longest match), CREST and DReSD in the shapes 10 x 6, 10 x 10 and 3 x 20 (drafts x
  tokens), greedy and nucleus sampling, stores of either distribution;
- nodes: the likeliest 8 to 64 nodes of each, and DReSD mixed with REST and the request;
- dims: PCA to 32, 64, 96 and 128 dimensions;
- shapes: 10 drafts of 1 to 20 tokens, 1 to 20 drafts of 10 tokens;
- live: decoding with drafts beside plain `generate`, token by token the same, and M beside that of the replay.

Three figures: M; acceptance, the accepted tokens of a pass by the length of a draft (the paper's rate); and the share
of verified nodes that are accepted, which falls with every further draft.

The last line of stdout is one JSON document, also written to OUT/dresd.json, or OUT/dresd_PARTS.json of some parts.

Example:
    DRAFTSTORE_TEST_DATA=~/data python -m benchmarks.dresd --work ~/bench --corpus-dtype bfloat16
"""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import Workspace, add_arguments, open_workspace
from benchmarks.dresd_runs import COLUMNS, Outcome, Paths, as_json, run
from benchmarks.dresd_stores import Stores, make_stores
from benchmarks.dresd_texts import (
    GREEDY,
    ID,
    NUCLEUS,
    OOD,
    QUICK,
    SAMPLED,
    Extent,
    Texts,
    make_texts,
)
from benchmarks.measure import progress
from benchmarks.report import describe_machine, finish, save_lines, show_table
from benchmarks.smollm import add_model_argument, smollm
from draftstore.decoding.loop import Step, Tally
from draftstore.decoding.replay import Recording
from draftstore.drafting.drafter import Drafter
from draftstore.drafting.mixture import Mixture
from draftstore.drafting.request import RequestDrafter
from draftstore.hf import generate
from draftstore.hf.loading import DTYPES, LoadedModel, load_model
from draftstore.hf.recorded import with_states
from draftstore.hf.states import ModelStates

PARTS = ("stores", "matched", "nodes", "dims", "shapes", "live")
MATCHED = ((10, 6), (10, 10), (3, 20))
LENGTHS = (1, 2, 3, 4, 6, 8, 10, 15, 20)
DRAFTS = (1, 2, 3, 5, 7, 10, 15, 20)
DIMS = (32, 64, 96, 128)
BUDGETS = (8, 16, 32, 64)
DEPTH = 10
NAMES = {OOD: "out of distribution", ID: "in distribution", SAMPLED: "in distribution, sampled"}


class Bench:
    """The model, the texts and the stores."""

    def __init__(self, space: Workspace, args: argparse.Namespace) -> None:
        """Make what is not there yet."""
        self.extent = QUICK if args.quick else Extent()
        model = smollm(space, args.model)
        self.loaded: LoadedModel = load_model(model, dtype="float32")
        self.texts: Texts = make_texts(
            space, self.loaded, model, self.extent, args.corpus_dtype, args.corpora
        )
        dims = DIMS if "dims" in args.parts else (64,)
        reader = self.loaded if args.corpus_dtype == "float32" else load_model(model, dtype=args.corpus_dtype)
        self.stores: dict[str, Stores] = {
            name: make_stores(
                space, self.loaded.text, ModelStates(reader), corpus, self.extent.ngrams,
                dims if name != SAMPLED else (64,),
            )
            for name, corpus in self.texts.corpora.items()
        }  # fmt: skip

    def dense(self, name: str, drafts: int, length: int, dims: int = 64) -> Drafter:
        """Return the drafter of a dense store."""
        return self.stores[name].dense[dims].drafter("wide", drafts=drafts, length=length)

    def rest(self, name: str, drafts: int, length: int) -> Drafter:
        """Return REST as published, in a shape."""
        return Paths(self.stores[name].rest.drafter("longest", depth=length), drafts)

    def crest(self, name: str, drafts: int) -> Drafter:
        """Return CREST in a shape; its trees are as deep as they were built."""
        return Paths(self.stores[name].crest.drafter("longest"), drafts)


def describe_stores(bench: Bench) -> dict[str, Any]:
    """Show what the stores are."""
    found: dict[str, Any] = {}
    for name, stores in bench.stores.items():
        for dims, store in stores.dense.items():
            manifest = store.manifest
            entries = manifest.counts["entries"]
            found[f"{name} {dims}"] = {
                "counts": manifest.counts,
                "bytes": manifest.size,
                "bytes_per_entry": round(_index_bytes(manifest.files) / entries, 1),
                "explained_variance": manifest.parameters["explained_variance"],
                "quality": manifest.parameters["quality"],
                "rest_bytes": stores.rest.manifest.size,
                "crest_bytes": stores.crest.manifest.size,
                "build": stores.build if dims == 64 else {},
            }
    asked = ("mean_reciprocal_rank", "mean_reciprocal_rank_ties", "recall_at_10")
    table = [
        [name, each["counts"]["tokens"], each["counts"]["entries"], each["bytes_per_entry"],
         each["explained_variance"], *(each["quality"].get(key, "-") for key in asked),
         each["build"].get("tokens_per_second", "-")]
        for name, each in found.items()
    ]  # fmt: skip
    columns = ["store, dims", "tokens", "entries", "bytes/entry", "variance", "MRR", "MRR, ties", "recall@10"]
    columns += ["tokens/s"]
    show_table("DReSD stores; bytes without projection and tokenizer", columns, table)
    return found


def save_queries(bench: Bench, folder: Path) -> None:
    """Write what decoding asks each store with, for `benchmarks.dresd_search`: states that no store holds."""
    recordings = [recording for recorded in bench.texts.recordings.values() for recording in recorded]
    tokens = np.concatenate([recording.output for recording in recordings])
    hidden = np.concatenate([recording.hidden for recording in recordings if recording.hidden is not None])
    for name, stores in bench.stores.items():
        np.savez(
            folder / f"queries_{name}.npz", queries=stores.dense[64].projection.apply(hidden), tokens=tokens
        )


def _index_bytes(files: Mapping[str, Any]) -> int:
    """Return the bytes of a dense store without its projection and tokenizer."""
    return sum(
        entry.size
        for name, entry in files.items()
        if name != "projection.bin" and not name.startswith("tokenizer/")
    )


def compare_matched(bench: Bench) -> dict[str, Any]:
    """Compare the stores in the same shapes."""
    found: dict[str, Any] = {}
    for how, recordings in bench.texts.recordings.items():
        for name in bench.stores:
            for drafts, length in MATCHED:
                progress(f"matched {how} {name} {drafts} x {length}")
                shape: dict[str, Drafter] = {
                    "REST": bench.rest(name, drafts, length),
                    "CREST": bench.crest(name, drafts),
                    "DReSD": bench.dense(name, drafts, length),
                }
                outcomes = {label: run(drafter, recordings, length) for label, drafter in shape.items()}
                title = f"{how} answers, {NAMES[name]}, {drafts} drafts of {length} tokens"
                show_outcomes(title, outcomes)
                found[f"{how}, {name}, {drafts} x {length}"] = as_json(outcomes)
    return found


def show_outcomes(title: str, outcomes: Mapping[str, Outcome]) -> None:
    """Print a table."""
    show_table(title, COLUMNS, [[name, *outcome.row()] for name, outcome in outcomes.items()])


def compare_nodes(bench: Bench) -> dict[str, Any]:
    """Compare the likeliest nodes of each, and mixtures."""
    found: dict[str, Any] = {}
    recordings = bench.texts.recordings[GREEDY]
    vocab_size = bench.loaded.text.vocab_size
    for name, stores in bench.stores.items():
        drafters: dict[str, Drafter] = {
            "REST, longest match": stores.rest.drafter("longest"),
            "REST, backoff": stores.rest.drafter("backoff"),
            "CREST": stores.crest.drafter(),
            "DReSD": stores.dense[64].drafter(),
        }
        drafters["DReSD + backoff"] = Mixture([drafters["REST, backoff"], drafters["DReSD"]])
        drafters["backoff + request"] = Mixture([RequestDrafter(vocab_size), drafters["REST, backoff"]])
        drafters["DReSD + backoff + request"] = Mixture(
            [RequestDrafter(vocab_size), drafters["REST, backoff"], drafters["DReSD"]]
        )
        for budget in BUDGETS:
            progress(f"nodes {name} {budget}")
            outcomes = {label: run(drafter, recordings, DEPTH, budget) for label, drafter in drafters.items()}
            show_outcomes(f"greedy answers, {NAMES[name]}, at most {budget} nodes", outcomes)
            found[f"{name}, {budget}"] = as_json(outcomes)
    return found


def compare_dims(bench: Bench, args: argparse.Namespace) -> dict[str, Any]:
    """Compare dimensions of the PCA."""
    found: dict[str, Any] = {}
    for name in (OOD, ID):
        if name not in bench.stores:
            continue
        outcomes = {
            dims: run(bench.dense(name, 10, DEPTH, dims), bench.texts.recordings[GREEDY], DEPTH)
            for dims in DIMS
        }
        show_outcomes(
            f"greedy answers, {NAMES[name]}, 10 x 10, by PCA dimensions",
            {str(dims): outcome for dims, outcome in outcomes.items()},
        )
        found[name] = {dims: outcome._asdict() for dims, outcome in outcomes.items()}
    lines = {NAMES[name]: [row["acceptance"] for row in rows.values()] for name, rows in found.items()}
    labels = ("dimensions of the PCA", "accepted / draft length, %")
    save_lines(args.out / "dresd_dims.png", "DReSD by dimensions, 10 x 10, greedy", labels, DIMS, lines)
    return found


def compare_shapes(bench: Bench, args: argparse.Namespace) -> dict[str, Any]:
    """Vary the length of drafts, and how many there are."""
    found: dict[str, Any] = {}
    recordings = bench.texts.recordings[GREEDY]
    series: list[tuple[str, str, Sequence[int], Callable[[int], tuple[int, int]]]] = [
        ("length", "tokens of each of 10 drafts", LENGTHS, lambda value: (10, value)),
        ("drafts", "drafts of 10 tokens", DRAFTS, lambda value: (value, 10)),
    ]
    for key, label, values, shape_of in series:
        lines: dict[str, list[float]] = {}
        for title, drafter, name in _ways(bench):
            progress(f"shapes {key} {title}")
            outcomes = {
                value: run(drafter(name, *shape_of(value)), recordings, shape_of(value)[1])
                for value in values
            }
            lines[title] = [outcome.accepted_length for outcome in outcomes.values()]
            found[f"{key}: {title}"] = {value: outcome._asdict() for value, outcome in outcomes.items()}
            show_outcomes(
                f"{title}, by {label}", {str(value): outcome for value, outcome in outcomes.items()}
            )
        path = args.out / f"dresd_{key}.png"
        save_lines(path, f"accepted length by {label}, greedy", (label, "accepted length M"), values, lines)
    return found


def _ways(bench: Bench) -> Iterator[tuple[str, Callable[[str, int, int], Drafter], str]]:
    """Yield what the shapes of are varied."""
    for name in (OOD, ID):
        if name in bench.stores:
            yield f"DReSD, {NAMES[name]}", bench.dense, name
            yield f"REST, {NAMES[name]}", bench.rest, name


def decode_live(bench: Bench) -> dict[str, Any]:
    """Decode with drafts beside plain generate.

    Raises:
        SystemExit: an output differs.
    """
    import torch

    drafter = bench.stores[ID if ID in bench.stores else OOD].dense[64].drafter()
    model: Any = bench.loaded.model
    tally = Tally()
    recorded = []
    for recording in bench.texts.recordings[GREEDY][: bench.extent.live]:
        progress(f"live {recording.id}")
        prompt = torch.from_numpy(recording.prompt.astype(np.int64))[None]
        plain = model.generate(prompt, max_new_tokens=bench.extent.tokens, do_sample=False)
        steps: list[Step] = []
        drafted = generate(
            model, prompt, drafter=drafter, on_step=steps.append,
            max_new_tokens=bench.extent.tokens, do_sample=False,
        )  # fmt: skip
        if not isinstance(drafted, torch.Tensor) or not torch.equal(plain, drafted):
            raise SystemExit(f"the output of {recording.id} differs from that of plain generate")
        for step in steps[1:]:  # behind the prefill
            tally.add(step)
        output = plain[0, prompt.shape[1] :].numpy().astype(np.int32)
        recorded.append(Recording(recording.id, recording.prompt, output))
    replayed = run(drafter, list(with_states(model, recorded)), DEPTH, budget=BUDGETS[-1])
    found = {
        "outputs": len(recorded),
        "equal": len(recorded),
        "accepted_length": round(tally.accepted_length, 4),
        "replayed": replayed.accepted_length,
    }
    show_table("live decoding with DReSD", list(found), [list(found.values())])
    return found


def main() -> None:
    """Run the parts and finish with the JSON document."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dresd", description=__doc__)
    add_arguments(parser, code=True)
    add_model_argument(parser)
    parser.add_argument(
        "--parts", type=lambda text: text.split(","), default=list(PARTS), help="some of: %(default)s"
    )
    parser.add_argument(
        "--corpora",
        type=lambda text: text.split(","),
        default=[OOD, ID, SAMPLED],
        help="some of: %(default)s",
    )
    parser.add_argument(
        "--corpus-dtype", choices=DTYPES, default="float32",
        help="of the weights that answer and read the texts of stores (default: %(default)s); bfloat16 is three times "
        "as fast on CPUs that know it",
    )  # fmt: skip
    args = parser.parse_args()
    document = describe_machine(("torch", "transformers")) | {
        "quick": args.quick,
        "corpus_dtype": args.corpus_dtype,
    }
    with open_workspace(args) as space:
        bench = Bench(space, args)
        document["sampling"] = {"names": [GREEDY, NUCLEUS], "extent": vars(bench.extent)}
        parts: dict[str, Callable[[], dict[str, Any]]] = {
            "stores": lambda: describe_stores(bench),
            "matched": lambda: compare_matched(bench),
            "nodes": lambda: compare_nodes(bench),
            "dims": lambda: compare_dims(bench, args),
            "shapes": lambda: compare_shapes(bench, args),
            "live": lambda: decode_live(bench),
        }
        save_queries(bench, space.work)
        for part in args.parts:
            document[part] = parts[part]()
        name = "dresd" if list(args.parts) == list(PARTS) else "dresd_" + "_".join(args.parts)
        finish(args.out, name, document)


if __name__ == "__main__":
    main()
