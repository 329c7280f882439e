"""Lossless or not: `python -m benchmarks.identity`.

Two parts, each compares decoding with drafts with `model.generate`, token by token, greedy:

stories   stories260K in float64 on 100 prompts, for every drafter, attention and cache.
smollm    SmolLM2-135M-Instruct in float32 on 20 prompts of 64 tokens, for every drafter. A difference is excused only
          where the two largest logits lie within 1e-4; each is listed with that margin.

Drafters are real ones (stores of the model's own texts and hidden states, Token Recycling, the request, all of them),
adversaries (random trees, always wrong, empty, ends inside, over budget), and a prophet that knows the answer and hides
it behind decoys, so that accepted rows are never the first rows of a pass. Tables first; the last line of stdout is one
JSON document, also written to OUT/identity_PARTS.json. Exit status 1 if anything differs that is not excused.

Example:
    DRAFTSTORE_TEST_DATA=~/data python -m benchmarks.identity --work ~/bench
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.progress import Progress

from benchmarks.common import SEED, Workspace, add_arguments, open_workspace
from benchmarks.decode_texts import Extent as TextExtent
from benchmarks.decode_texts import make_text
from benchmarks.lossless import EXCUSED, compare
from benchmarks.report import describe_machine, finish, show_table
from benchmarks.smollm import add_model_argument, smollm
from draftstore.cli.common import count_progress
from draftstore.decoding.loop import Step, Tally
from draftstore.drafting.drafter import Drafter
from draftstore.drafting.mixture import Mixture
from draftstore.drafting.recycling import RecyclingDrafter
from draftstore.drafting.request import RequestDrafter
from draftstore.hf import generate
from draftstore.hf.loading import LoadedModel, load_model
from draftstore.hf.states import ModelStates
from draftstore.stores.crest.build import CrestOptions, build_crest
from draftstore.stores.crest.store import CrestStore
from draftstore.stores.dresd.build import DresdOptions, build_dresd
from draftstore.stores.dresd.store import DresdStore
from draftstore.stores.rest.build import RestOptions, build_rest
from draftstore.stores.rest.store import RestStore
from tests.fakes.adversaries import (
    Adversary,
    AlwaysWrong,
    EosInside,
    OverBudget,
    Prophet,
    RandomTrees,
    Silent,
)
from tests.fakes.hf_models import uncompiled

PARTS = ("stories", "smollm")
ATTENTIONS = ("sdpa", "eager", "flex_attention")
CACHES = ("dynamic", "static")
DRAFTERS = (
    "none", "rest", "crest", "dresd", "request", "recycling", "all",
    "random", "wrong", "empty", "ends inside", "over budget", "prophet",
)  # fmt: skip
ERROR_RATE = 0.2


@dataclasses.dataclass(frozen=True)
class Extent:
    """How much is compared.

    Attributes:
        stories: prompts of the small model.
        story_tokens: most tokens of their outputs.
        slow_stories: prompts where attention is not compiled, which is slow.
        smollm: prompts of the larger model.
        smollm_tokens: most tokens of their outputs.
        texts: of the larger model's store.
    """

    stories: int = 100
    story_tokens: int = 48
    slow_stories: int = 100
    smollm: int = 20
    smollm_tokens: int = 64
    texts: TextExtent = dataclasses.field(
        default_factory=lambda: TextExtent(prompts=20, tokens=64, samples=1)
    )


COUNTS = {
    "stories": "prompts of stories260K",
    "slow_stories": "of these with flex_attention, which is not compiled here and takes minutes for each drafter",
    "smollm": "prompts of SmolLM2",
}
"""What of an extent can be asked for."""

QUICK = Extent(
    stories=3, story_tokens=12, slow_stories=1, smollm=1, smollm_tokens=8,
    texts=TextExtent(prompts=2, tokens=8, samples=1, ngrams=500),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Case:
    """What is decoded.

    Attributes:
        model: of transformers.
        vocab_size: ids that it knows.
        eos: id that ends a text.
        rest: a store of its texts.
        crest: trees made from it.
        dresd: a store of its hidden states over the same texts.
        tokens: most tokens of an output.
    """

    model: Any
    vocab_size: int
    eos: int
    rest: RestStore
    crest: CrestStore
    dresd: DresdStore
    tokens: int

    def drafter(self, name: str, texts: Sequence[Sequence[int]]) -> Drafter | None:
        """Return a drafter by its name; some are shown the texts, prompts and outputs, that are to come."""
        size = self.vocab_size
        makers: dict[str, Callable[[], Drafter | None]] = {
            "none": lambda: None,
            "rest": self.rest.drafter,
            "crest": self.crest.drafter,
            "dresd": self.dresd.drafter,
            "request": lambda: RequestDrafter(size),
            "recycling": lambda: RecyclingDrafter(size),
            "all": lambda: Mixture(
                [
                    RequestDrafter(size),
                    self.rest.drafter(),
                    self.crest.drafter(),
                    self.dresd.drafter(),
                    RecyclingDrafter(size),
                ]
            ),
            "random": lambda: RandomTrees(size),
            "wrong": lambda: AlwaysWrong(size, texts),
            "empty": lambda: Silent(size),
            "ends inside": lambda: EosInside(size, texts, self.eos),
            "over budget": lambda: OverBudget(size),
            "prophet": lambda: Prophet(size, texts, error_rate=ERROR_RATE),
        }
        return makers[name]()

    def plain(self, prompt: NDArray[np.int32], cache: str) -> list[int]:
        """Return the output of `model.generate`."""
        ids = self._ids(prompt)
        output = self.model.generate(ids, **self._options(ids, cache))
        return _tail(output, prompt)

    def drafted(
        self, prompt: NDArray[np.int32], cache: str, drafter: Drafter | None, tally: Tally
    ) -> list[int]:
        """Return the output with drafts, and count its passes; the prefill is no pass."""
        ids = self._ids(prompt)
        steps: list[Step] = []
        output = generate(self.model, ids, drafter=drafter, on_step=steps.append, **self._options(ids, cache))
        for step in steps[1:]:
            tally.add(step)
        return _tail(output, prompt)

    def _ids(self, prompt: NDArray[np.int32]) -> torch.Tensor:
        return torch.from_numpy(prompt.astype(np.int64))[None].to(self.model.device)

    def _options(self, ids: torch.Tensor, cache: str) -> dict[str, Any]:
        return {
            "attention_mask": torch.ones_like(ids),
            "max_new_tokens": self.tokens,
            "do_sample": False,
            "pad_token_id": self.eos,
            "cache_implementation": cache,
        }


def _tail(output: Any, prompt: NDArray[np.int32]) -> list[int]:
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens


def compare_all(
    case: Case,
    prompts: Sequence[NDArray[np.int32]],
    *,
    plain_cache: str,
    cache: str,
    on_row: Callable[[int], None],
) -> list[dict[str, Any]]:
    """Decode every prompt with every drafter.

    Args:
        case: what is decoded.
        prompts: int32 [any] each.
        plain_cache: of plain generate.
        cache: of decoding with drafts.
        on_row: called with the number of outputs that were compared.

    Returns:
        a row of figures for each drafter.
    """
    expected = [case.plain(prompt, plain_cache) for prompt in prompts]
    texts = [
        [*prompt.tolist(), *output, *[case.eos] * 8] for prompt, output in zip(prompts, expected, strict=True)
    ]
    rows = []
    for name in DRAFTERS:
        drafter, tally, differences = case.drafter(name, texts), Tally(), []
        for place, prompt in enumerate(prompts):
            found = case.drafted(prompt, cache, drafter, tally)
            difference = compare(case.model, prompt, expected[place], found)
            if difference is not None:
                differences.append(
                    {"prompt": place, **dataclasses.asdict(difference), "excused": difference.excused}
                )
            on_row(1)
        row = {
            "drafter": name,
            "prompts": len(prompts),
            "identical": len(prompts) - len(differences),
            "accepted_length": round(tally.accepted_length, 3),
            "differences": differences,
        }
        if isinstance(drafter, Adversary):
            row |= {"off_first": drafter.off_first, "moved": drafter.moved}
        rows.append(row)
    return rows


def run_stories(space: Workspace, extent: Extent, bars: Progress) -> list[dict[str, Any]]:
    """Compare the small model in float64, for every attention and cache."""
    folder = space.data / "models" / "stories260K"
    loaded = load_model(folder, dtype="float64", device="cpu")
    prompts, rest, crest, dresd = _stories(space, loaded, extent.stories)
    total = len(DRAFTERS) * len(CACHES) * (2 * len(prompts) + min(extent.slow_stories, len(prompts)))
    task = bars.add_task("stories260K, float64", total=total, detail="")
    rows = []
    for attention in ATTENTIONS:
        flexible = attention == "flex_attention"
        model = load_model(folder, dtype="float64", device="cpu", attention=attention).model
        case = Case(model, loaded.vocab_size, 2, rest, crest, dresd, extent.story_tokens)
        for cache in CACHES:
            bars.update(task, detail=f"{attention}, {cache} cache")
            # Plain generate fails with flex_attention and a static cache.
            plain_cache = "dynamic" if flexible else cache
            with uncompiled() if flexible else nullcontext():
                found = compare_all(
                    case,
                    prompts[: extent.slow_stories] if flexible else prompts,
                    plain_cache=plain_cache,
                    cache=cache,
                    on_row=lambda count: bars.advance(task, count),
                )
            rows += [{"attention": attention, "cache": cache, **row} for row in found]
    return rows


def run_smollm(space: Workspace, extent: Extent, bars: Progress, model: Path | None) -> list[dict[str, Any]]:
    """Compare the larger model in float32."""
    loaded = load_model(smollm(space, model), dtype="float32", device="cpu")
    text = make_text(space, loaded, "own", extent.texts)
    prompts = text.prompts[: extent.smollm]
    dresd = _dense(loaded, text.corpus, text.rest.path.with_name(f"{text.rest.path.name}-dresd"))
    case = Case(loaded.model, loaded.vocab_size, 2, text.rest, text.crest, dresd, extent.smollm_tokens)
    task = bars.add_task("SmolLM2-135M, float32", total=len(DRAFTERS) * len(prompts), detail="")
    rows = compare_all(
        case, prompts, plain_cache="dynamic", cache="dynamic", on_row=lambda count: bars.advance(task, count)
    )
    return [{"attention": "sdpa", "cache": "dynamic", **row} for row in rows]


def _stories(
    space: Workspace, loaded: LoadedModel, count: int
) -> tuple[list[NDArray[np.int32]], RestStore, CrestStore, DresdStore]:
    """Return prompts of 4 to 40 tokens that the small model has made itself, and stores of other stories of its own."""
    torch.manual_seed(SEED)
    model: Any = loaded.model
    start = torch.full((count + 200, 1), 1)
    told = model.generate(
        start,
        attention_mask=torch.ones_like(start),
        do_sample=True,
        top_k=0,
        max_new_tokens=120,
        pad_token_id=2,
    )
    stories = [[token for token in row if token != 2] for row in told.tolist()]
    lengths = np.random.default_rng(SEED).integers(4, 41, count)
    prompts = [
        np.array(story[:length], np.int32) for story, length in zip(stories[:count], lengths, strict=True)
    ]
    corpus = space.work / "corpora" / f"stories_{count}.jsonl"
    corpus.write_text(
        "".join(_line(loaded.text.decode(story[1:])) for story in stories[count:]), encoding="utf-8"
    )
    rest, crest = space.work / "stores" / f"stories-{count}", space.work / "stores" / f"stories-{count}-crest"
    build_rest(RestOptions(corpus=(corpus,), name="stories"), loaded.text, rest, overwrite=True, workers=1)
    build_crest(CrestOptions(name="stories-crest", ngrams=5_000), rest, crest, overwrite=True)
    dresd = _dense(loaded, (corpus,), rest.with_name(f"{rest.name}-dresd"))
    return prompts, RestStore.open(rest), CrestStore.open(crest), dresd


def _dense(loaded: LoadedModel, corpus: tuple[Path, ...], path: Path) -> DresdStore:
    """Build a store of the model's hidden states over some texts."""
    source = ModelStates(loaded)
    build_dresd(DresdOptions(corpus=corpus, name=path.name), loaded.text, source, path, overwrite=True)
    return DresdStore.open(path, target_model=loaded.name, hidden_size=loaded.hidden_size)


def _line(text: str) -> str:
    return json.dumps({"text": text}) + "\n"


def unexcused(rows: Sequence[dict[str, Any]]) -> int:
    """Return how many outputs differ without excuse."""
    return sum(not difference["excused"] for row in rows for difference in row["differences"])


def show(title: str, rows: Sequence[dict[str, Any]]) -> None:
    """Print a table of identical outputs, and every difference."""
    ways = list(dict.fromkeys((row["attention"], row["cache"]) for row in rows))
    table = []
    for name in DRAFTERS:
        own = {(row["attention"], row["cache"]): row for row in rows if row["drafter"] == name}
        first = own[ways[0]]
        same = [f"{own[way]['identical']} of {own[way]['prompts']}" for way in ways]
        table.append(
            (name, *same, first["accepted_length"], first.get("off_first", ""), first.get("moved", ""))
        )
    headings = [f"{attention} {cache}" for attention, cache in ways]
    columns = ("drafter", *headings, "tokens a pass", "not the first branch", "rows moved")
    show_table(f"{title}: outputs identical to plain generate", columns, table)
    for row in rows:
        for difference in row["differences"]:
            excuse = "excused" if difference["excused"] else "NOT EXCUSED"
            print(
                f"{row['drafter']}, {row['attention']} {row['cache']}, prompt {difference['prompt']}, token "
                f"{difference['place']}: {difference['expected']} became {difference['found']}; the two largest "
                f"logits there are {difference['margin']:.2e} apart ({excuse})"
            )


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.identity", description=__doc__)
    add_arguments(parser)
    add_model_argument(parser)
    parser.add_argument("--parts", default=",".join(PARTS), help="any of %(default)s, joined by commas")
    for name, what in COUNTS.items():
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=int, help=f"{what} (default: {getattr(Extent(), name)})")
    args = parser.parse_args(arguments)
    if unknown := set(args.parts.split(",")) - set(PARTS):
        parser.error(f"unknown parts {', '.join(sorted(unknown))}: choose from {', '.join(PARTS)}")
    return args


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare, print the tables, and finish with the JSON document."""
    args = parse_arguments(arguments)
    asked = {name: getattr(args, name) for name in COUNTS if getattr(args, name) is not None}
    extent = dataclasses.replace(QUICK if args.quick else Extent(), **asked)
    parts = args.parts.split(",")
    figures: dict[str, Any] = describe_machine(["torch", "transformers"]) | {
        "quick": args.quick,
        "excused_margin": EXCUSED,
    }
    wrong = 0
    with open_workspace(args) as space, count_progress("outputs") as bars:
        if "stories" in parts:
            figures["stories"] = run_stories(space, extent, bars)
        if "smollm" in parts:
            figures["smollm"] = run_smollm(space, extent, bars, args.model)
    for part in (part for part in PARTS if part in figures):
        show(part, figures[part])
        wrong += unexcused(figures[part])
    finish(args.out, f"identity_{'_'.join(parts)}", figures | {"unexcused": wrong})
    if wrong:
        sys.exit(1)


if __name__ == "__main__":
    main()
