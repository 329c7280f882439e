"""`draftstore generate`: one answer of a model, decoded with drafts, and the speedup."""

import dataclasses
import secrets
import sys
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table

from draftstore.assembly import Assembly, Sources, assemble
from draftstore.cli.answering import (
    Printer,
    TimedAnswer,
    answer,
    check_positions,
    first_difference,
)
from draftstore.cli.common import json_option, print_json, status, stderr_console, stdout_console
from draftstore.cli.sources import (
    attention_option,
    device_option,
    dtype_option,
    effort_options,
    model_option,
    source_options,
    temperature_option,
    top_p_option,
)
from draftstore.errors import DraftstoreError, counted
from draftstore.hf.planning import Effort, VerificationPlan, choose_plan
from draftstore.hf.requests import GenerationRequest, Sampling
from draftstore.text.conversation import Content, encode_conversation
from draftstore.text.incremental import Pieces
from draftstore.text.tokenizer import TextTokenizer

if TYPE_CHECKING:
    from draftstore.hf.loading import LoadedModel


@click.command()
@model_option
@click.option("--prompt", help="Prompt to answer. [default: read from stdin]")
@click.option(
    "--prompt-file",
    type=click.File("r", encoding="utf-8"),
    metavar="FILE",
    help="Read the prompt from a file; - is stdin.",
)
@click.option(
    "--chat/--raw",
    "chat",
    default=None,
    help="Use the model's chat template, or continue the text as it is. [default: --chat if it has one]",
)
@click.option("--system", help="System message of the chat.")
@click.option(
    "--max-new-tokens",
    type=click.IntRange(min=1),
    default=256,
    show_default=True,
    help="Maximum number of tokens in the answer.",
)
@temperature_option
@top_p_option
@click.option(
    "--seed", type=click.IntRange(0, 2**63 - 1), help="Seed of the random numbers. [default: a new one]"
)
@device_option
@dtype_option
@attention_option
@source_options
@effort_options
@click.option("--no-compare", is_flag=True, help="Skip the comparison with decoding without drafts.")
@json_option
def generate(
    model: str,
    prompt: str | None,
    prompt_file: Any,
    chat: bool | None,
    system: str | None,
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    seed: int | None,
    device: str | None,
    dtype: str | None,
    attention: str | None,
    sources: Sources,
    effort: Effort,
    no_compare: bool,
    as_json: bool,
) -> None:
    """Answer a prompt with drafts, then without, and compare.

    The answer goes to stdout, on a terminal with accepted draft tokens in green; the figures go to stderr. Drafts come
    from the prompt and the answer so far, and from whatever else is named.

    \b
    Examples:
      draftstore generate --model ./SmolLM2-135M-Instruct --store stores/chat --prompt "What is a trie?"
      draftstore generate --model org/model --recycling --temperature 0.7 --seed 1 < question.txt
      draftstore generate --model ./model --raw --prompt "def main(" --no-compare
    """
    text = _prompt(prompt, prompt_file)
    with status("loading the model"):
        from draftstore.hf.loading import load_model

        loaded = load_model(model, device=device, dtype=dtype, attention=attention)
    seed = secrets.randbits(32) if seed is None else seed
    sampling = Sampling(temperature=temperature, top_p=top_p, seed=seed)
    prompt_ids = encode_conversation(loaded.text, _content(loaded.text, text, chat, system))
    request = check_positions(loaded, GenerationRequest(prompt_ids, max_new_tokens, sampling))
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
        if not no_compare:  # otherwise torch's first-pass overhead would count for the first answer
            with status("warming up"):
                answer(loaded, dataclasses.replace(request, max_tokens=min(3, max_new_tokens)), drafter=None)
        drafted = _with_drafts(loaded, request, assembly, plan, effort, silent=as_json)
    plain = None
    if not no_compare:
        with status("decoding again, without drafts"):
            plain = answer(loaded, request, drafter=None)
    report = _report(loaded, request, assembly, plan, drafted, plain)
    if as_json:
        print_json(report)
    else:
        _show(report)


def _prompt(prompt: str | None, prompt_file: Any) -> str:
    """Return the text of the prompt."""
    if prompt is not None and prompt_file is not None:
        raise click.UsageError("--prompt and --prompt-file exclude each other: give one of them")
    if prompt is not None:
        return prompt
    if prompt_file is None and sys.stdin.isatty():
        raise click.UsageError("no prompt: give --prompt, --prompt-file, or text on stdin")
    try:
        text: str = (prompt_file or sys.stdin).read()
    except UnicodeDecodeError as error:
        raise DraftstoreError(f"the prompt is not UTF-8 text: {error}") from None
    return text.removesuffix("\n")


def _content(tokenizer: TextTokenizer, text: str, chat: bool | None, system: str | None) -> Content:
    """Return the prompt for the model: a conversation, or the text itself."""
    if tokenizer.has_chat_template if chat is None else chat:
        messages = [{"role": "system", "content": system}] if system is not None else []
        return [*messages, {"role": "user", "content": text}]
    if system is not None:
        raise click.UsageError("--system needs --chat: this model has no chat template, or --raw was given")
    return text


def _with_drafts(
    loaded: "LoadedModel",
    request: GenerationRequest,
    assembly: Assembly,
    plan: VerificationPlan,
    effort: Effort,
    *,
    silent: bool,
) -> TimedAnswer:
    """Decode with drafts, and write the answer as it grows."""
    drafter = assembly if assembly.parts else None
    printer = None if silent else Printer(stdout_console(), Pieces(loaded.text, request.prompt))
    try:
        return answer(
            loaded,
            request,
            drafter=drafter,
            planner=plan.planner,
            min_prob=effort.min_prob,
            on_step=printer.take if printer else lambda _step: None,
        )
    finally:
        if printer:
            printer.finish()


def _report(
    loaded: "LoadedModel",
    request: GenerationRequest,
    assembly: Assembly,
    plan: VerificationPlan,
    drafted: TimedAnswer,
    plain: TimedAnswer | None,
) -> dict[str, Any]:
    """Return all figures as JSON values."""
    kept = [token for token in drafted.tokens if token not in loaded.text.special_ids]
    report: dict[str, Any] = {
        "model": loaded.name,
        "device": str(loaded.model.device),
        "prompt_tokens": len(request.prompt),
        "text": loaded.text.decode(kept),
        "finish": "length" if len(drafted.tokens) == request.max_tokens else "stop",
        "temperature": request.sampling.temperature,
        "seed": request.sampling.seed if request.sampling.temperature else None,
        "drafters": [{"kind": part.kind, "name": part.name} for part in assembly.parts],
        "effort": plan.words,
        "with_drafts": drafted.figures(),
    }
    if plain is not None:
        report["without_drafts"] = plain.figures()
        report["speedup"] = round(drafted.tokens_per_second / max(plain.tokens_per_second, 1e-9), 3)
        report["first_difference"] = first_difference(drafted.tokens, plain.tokens)
    return report


def _show(report: dict[str, Any]) -> None:
    """Print the figures."""
    console = stderr_console()
    table = Table("", "tokens", "passes", "tokens a pass", "tokens/s")
    rows = {"with drafts": report["with_drafts"], "without": report.get("without_drafts")}
    for name, row in rows.items():
        if row:
            numbers = (str(row["tokens"]), str(row["passes"]), f"{row['accepted_length']:.2f}")
            table.add_row(name, *numbers, f"{row['tokens_per_second']:.1f}")
    console.print(table)
    figures = report["with_drafts"]
    names = ", ".join(drafter["name"] for drafter in report["drafters"]) or "nothing"
    console.print(f"drafts of {names}; {report['effort']}")
    verified = f"{counted(figures['drafted'], 'node')} verified, {figures['accepted']:,} accepted"
    if names != "nothing" and not figures["drafted"]:
        verified = "no draft was worth its time"
    console.print(verified + _comparison(report))


def _comparison(report: dict[str, Any]) -> str:
    """Describe the result of the comparison."""
    if "speedup" not in report:
        return ""
    place = report["first_difference"]
    same = "the same output"
    if place is not None:
        same = f"the output differs from token {place} on: rounding decided between equally likely tokens"
    return f"; {report['speedup']:.2f} times as fast, {same}"
