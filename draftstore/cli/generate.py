"""`draftstore generate`: one model answer, decoded with drafts, and the speedup."""

import dataclasses
import secrets
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click
from pydantic import Field
from rich.console import Console
from rich.text import Text

from draftstore.assembly.drafter import Assembly, assemble
from draftstore.assembly.sources import Sources
from draftstore.cli.common import read_stdin, status
from draftstore.cli.options import Command, takes
from draftstore.cli.output import console, json_option, print_json, print_table, printable, say
from draftstore.cli.steadiness import Steadiness, load_now
from draftstore.decoding.budget import Fixed, Planner
from draftstore.decoding.conversation import Content, Pieces, encode_conversation
from draftstore.decoding.loop import Step, Tally
from draftstore.drafting.drafter import Drafter
from draftstore.errors import DraftstoreError, counted
from draftstore.hf.loading import ModelOptions
from draftstore.hf.planning import Effort, choose_plan
from draftstore.hf.requests import Drawing, GenerationRequest, Sampling
from draftstore.options import Shown
from draftstore.text.tokenizer import TextTokenizer

if TYPE_CHECKING:
    from draftstore.hf.loading import LoadedModel

ACCEPTED = "green"


@dataclasses.dataclass
class TimedAnswer:
    """An answer and its timings."""

    tokens: list[int] = dataclasses.field(default_factory=list)
    tally: Tally = dataclasses.field(default_factory=Tally)
    prefill_ns: int = 0
    times: list[int] = dataclasses.field(default_factory=list)  # of the passes after it, in ns

    def take(self, step: Step) -> None:
        """Add a step; the first is the prefill."""
        taken = step.draft_ns + step.forward_ns + step.accept_ns
        if self.tokens:
            self.tally.add(step)
            self.times.append(taken)
        else:
            self.prefill_ns = taken
        self.tokens += step.tokens.tolist()

    @property
    def tokens_per_second(self) -> float:
        """Number of tokens after the first, divided by the duration of their passes."""
        return self.tally.tokens * 1e9 / self._pass_ns

    @property
    def _pass_ns(self) -> int:
        return max(sum(self.times), 1)

    def figures(self) -> dict[str, Any]:
        """Return the figures as JSON values."""
        tally = self.tally
        times = {"draft": tally.draft_ns, "forward": tally.forward_ns, "accept": tally.accept_ns}
        return {
            "tokens": len(self.tokens),
            "passes": tally.passes,
            "accepted_length": round(tally.accepted_length, 3),
            "tokens_per_second": round(self.tokens_per_second, 2),
            "drafted": tally.drafted,
            "accepted": tally.accepted,
            "prefill_seconds": round(self.prefill_ns / 1e9, 4),
            "shares": {name: round(taken / self._pass_ns, 4) for name, taken in times.items()},
        }


def answer(
    loaded: "LoadedModel",
    request: GenerationRequest,
    *,
    drafter: Drafter | None,
    planner: Planner | None = None,
    min_prob: float = 0.0,
    on_step: Callable[[Step], None] = lambda _: None,
) -> TimedAnswer:
    """Decode one answer; see `draftstore.hf.answering.batch_member` for the arguments."""
    from draftstore.hf.answering import batch_member
    from draftstore.hf.generation import batch_for, decode_all

    given = TimedAnswer()

    def take(step: Step) -> None:
        given.take(step)
        on_step(step)

    member = batch_member(loaded, request, drafter=drafter, planner=planner or Fixed(), min_prob=min_prob)
    with closing(batch_for(loaded.model, [member])) as batch:
        decode_all(batch, [member], take)
    return given


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Return the index of the first difference between two answers; None if they are equal."""
    pairs = enumerate(zip_longest(left, right))
    return next((index for index, (one, other) in pairs if one != other), None)


@dataclasses.dataclass
class Printer:
    """Streams an answer; on a terminal, accepted draft tokens are highlighted and control characters made visible."""

    console: Console
    pieces: Pieces

    def take(self, step: Step) -> None:
        """Write the tokens of a step."""
        for i, token in enumerate(step.tokens.tolist()):
            self._write(self.pieces.push(token), ACCEPTED if i < len(step.path) else "")

    def finish(self) -> None:
        """Write the text held back and end the line."""
        self._write(self.pieces.finish() + "\n", "")

    def _write(self, piece: str, style: str) -> None:
        if not self.console.is_terminal:
            click.echo(piece, nl=False, color=True)  # leaves escape sequences unchanged
        elif piece:
            shown = "\t".join(map(printable, piece.split("\t")))
            self.console.print(Text(shown, style), end="", soft_wrap=True)


def check_positions(loaded: "LoadedModel", request: GenerationRequest) -> GenerationRequest:
    """Return a request that fits the model, with fewer new tokens if necessary."""
    size, positions = len(request.prompt), loaded.positions
    if size == 0:
        raise DraftstoreError("the prompt is empty, and this model's tokenizer adds no BOS: give some text")
    if positions is None:
        return request
    if size >= positions:
        raise DraftstoreError(
            f"the prompt has {size:,} tokens, but {loaded.name!r} takes at most {positions - 1:,}: shorten it"
        )
    return dataclasses.replace(request, max_tokens=min(request.max_tokens, positions - size))


class Question(Drawing):
    """The prompt, and settings of the answer."""

    prompt: Annotated[str | None, Shown(unset="read from stdin")] = Field(
        None, description="Prompt to answer."
    )
    prompt_file: Path | None = Field(None, description="Read the prompt from a file; - is stdin.")
    chat: Annotated[bool | None, Shown(flags=("--chat/--raw",), unset="--chat if it has one")] = Field(
        None, description="Use the model's chat template, or continue the text as it is."
    )
    system: str | None = Field(None, description="System message of the chat.")
    max_tokens: int = Field(256, ge=1, description="Maximum number of tokens in the answer.")
    seed: Annotated[int | None, Shown(unset="a new one")] = Field(
        None, ge=0, le=2**63 - 1, description="Seed of the random numbers."
    )
    no_compare: bool = Field(False, description="Skip the comparison with decoding without drafts.")

    def text(self) -> str:
        """Return the text of the prompt."""
        if self.prompt is not None and self.prompt_file is not None:
            raise click.UsageError("--prompt and --prompt-file are mutually exclusive: give one of them")
        if self.prompt is not None:
            return self.prompt
        if self.prompt_file is None and sys.stdin.isatty():
            raise click.UsageError("no prompt: give --prompt, --prompt-file, or text on stdin")
        if self.prompt_file is None or str(self.prompt_file) == "-":
            return read_stdin()
        try:
            return self.prompt_file.read_text(encoding="utf-8").removesuffix("\n")
        except UnicodeDecodeError as error:
            raise DraftstoreError(f"the prompt is not UTF-8 text: {error}") from None

    def content(self, tokenizer: TextTokenizer, text: str) -> Content:
        """Return the prompt for the model: a conversation, or the text itself."""
        if tokenizer.has_chat_template if self.chat is None else self.chat:
            messages = [] if self.system is None else [{"role": "system", "content": self.system}]
            return [*messages, {"role": "user", "content": text}]
        if self.system is not None:
            raise click.UsageError(
                "--system needs --chat: this model has no chat template, or --raw was given"
            )
        return text


@click.command(cls=Command)
@takes(model=ModelOptions, question=Question, sources=Sources, effort=Effort)
@json_option
def generate(
    model: ModelOptions, question: Question, sources: Sources, effort: Effort, as_json: bool
) -> None:
    """Answer a prompt with drafts, then without, and compare the two.

    The answer goes to stdout, on a terminal with accepted draft tokens in green; the figures go to stderr. Drafts come
    from the prompt and the answer so far, and from the given sources.

    \b
    Examples:
      draftstore generate --model ./SmolLM2-135M-Instruct --store stores/chat --prompt "What is a trie?"
      draftstore generate --model org/model --recycling --temperature 0.7 --seed 1 < question.txt
      draftstore generate --model ./model --raw --prompt "def main(" --no-compare
    """
    text, load = question.text(), load_now()
    with status("loading the model"):
        loaded = model.load(model.model)
    request = _request(loaded, question, text)
    with status("opening the drafters"):
        assembly = assemble(
            sources,
            vocab_size=loaded.vocab_size,
            tokenizer=loaded.text.identity,
            model=loaded.name,
            hidden_size=loaded.hidden_size,
        )
    with assembly:
        plan = choose_plan(effort, loaded)
        if not question.no_compare:  # otherwise the first answer would include torch's first-pass overhead
            with status("warming up"):
                few = min(3, request.max_tokens)
                answer(loaded, dataclasses.replace(request, max_tokens=few), drafter=None)
        drafter, least = assembly if assembly.parts else None, effort.min_prob
        printer = None if as_json else Printer(console(), Pieces(loaded.text, request.prompt))
        try:
            take = printer.take if printer else lambda _: None
            drafted = answer(
                loaded, request, drafter=drafter, planner=plan.planner, min_prob=least, on_step=take
            )
        finally:
            if printer:
                printer.finish()
        assembly.remember(request.prompt, drafted.tokens)
    report = _report(loaded, request, assembly, drafted) | {"effort": plan.words}
    report["with_drafts"] = drafted.figures()
    if not question.no_compare:
        with status("decoding again, without drafts"):
            plain = answer(loaded, request, drafter=None)
        report["without_drafts"] = plain.figures()
        report["speedup"] = round(drafted.tokens_per_second / max(plain.tokens_per_second, 1e-9), 3)
        steadiness = Steadiness.of(load, plain.times)
        report |= {"machine": dataclasses.asdict(steadiness), "doubt": steadiness.doubt}
        report["first_difference"] = first_difference(drafted.tokens, plain.tokens)
    if as_json:
        print_json(report)
    else:
        _show(report)


def _request(loaded: "LoadedModel", question: Question, text: str) -> GenerationRequest:
    seed = secrets.randbits(32) if question.seed is None else question.seed
    sampling = Sampling(temperature=question.temperature, top_p=question.top_p, seed=seed)
    prompt = encode_conversation(loaded.text, question.content(loaded.text, text))
    return check_positions(loaded, GenerationRequest(prompt, question.max_tokens, sampling))


def _report(
    loaded: "LoadedModel", request: GenerationRequest, assembly: Assembly, drafted: TimedAnswer
) -> dict[str, Any]:
    kept = [token for token in drafted.tokens if token not in loaded.text.special_ids]
    return {
        "model": loaded.name,
        "device": str(loaded.model.device),
        "prompt_tokens": len(request.prompt),
        "text": loaded.text.decode(kept),
        "finish": "length" if len(drafted.tokens) == request.max_tokens else "stop",
        "temperature": request.sampling.temperature,
        "seed": request.sampling.seed if request.sampling.temperature else None,
        "drafters": [{"kind": part.kind, "name": part.name} for part in assembly.parts],
    }


def _show(report: dict[str, Any]) -> None:
    figures = report["with_drafts"]
    rows = [
        (
            name,
            row["tokens"],
            row["passes"],
            round(row["accepted_length"], 2),
            round(row["tokens_per_second"], 1),
        )
        for name, row in (("with drafts", figures), ("without", report.get("without_drafts")))
        if row
    ]
    print_table(("", "tokens", "passes", "M, tokens a pass", "tokens/s"), rows, err=True)
    names = ", ".join(drafter["name"] for drafter in report["drafters"]) or "nothing"
    say(f"drafts from {names}; {report['effort']}", err=True)
    verified = f"{counted(figures['drafted'], 'node')} verified, {figures['accepted']:,} accepted"
    if names != "nothing" and not figures["drafted"]:
        verified = "no draft was worth its time"
    say(verified + _comparison(report), err=True)
    if report.get("doubt"):
        say(report["doubt"], err=True)


def _comparison(report: dict[str, Any]) -> str:
    if "speedup" not in report:
        return ""
    place = report["first_difference"]
    same = "the same output"
    if place is not None:
        same = f"the outputs differ from token {place} on: rounding decided between equally likely tokens"
    length = report["with_drafts"]["accepted_length"]
    return f"; M {length:.2f}, {report['speedup']:.2f} times as fast, {same}"
