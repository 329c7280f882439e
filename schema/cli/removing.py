"""`draftstore corpus remove` and `prove-removed`: take-down, and proof that it is complete."""

from datetime import UTC, datetime
from typing import Any

import click

from draftstore.cli.common import status
from draftstore.cli.output import json_option, print_json, print_result, print_table, say
from draftstore.errors import CorpusError, DraftstoreError, counted
from draftstore.live.removing import Held
from schema.cli.common import catalogue_session, confirm
from schema.cli.corpus_fields import scan_with_progress, warn_of_problems
from schema.collections import collecting
from schema.collections.live_logs import check_live_logs, forget, live_logs
from schema.collections.models import Collection
from schema.collections.proving import Checked, check_live_builds, removed_keys, vouch, vouched
from schema.collections.removing import Selection, select_documents, write_removal

NOT_PROVEN = 5
"""Exit status if a live build or log holds removed documents, or cannot be checked and nobody vouched for it."""
LOG_COLUMNS = ("removed documents", "processes that may hold some", "not comparable", "damaged bytes")
LIMITS = (
    "not checked: the sources themselves, except live logs; builds that are not live; backups and copies of stores or "
    "of the database; logs; and the memory of lookup services and decoders until they follow the release"
)


def _where(collection: Collection, conditions: tuple[str, ...]) -> dict[str, Any]:
    """Return the source and time that `--where` names."""
    found: dict[str, Any] = {}
    for condition in conditions:
        key, _, value = condition.partition("=")
        places = {row.place: row.id for row in collection.sources}
        if key == "source" and (value.isdecimal() or value in places):
            found[key] = places[value] if value in places else int(value)
        elif key == "before":
            found[key] = _seconds(value)
        else:
            raise click.UsageError(
                f"--where {condition}: expected source=NUMBER, source=PATH or before=2026-01-31; "
                f"`draftstore corpus show {collection.name}` lists the sources"
            )
    return found


def _seconds(text: str) -> int:
    """Return the unix seconds of a date or time in ISO form, in UTC unless it names a zone."""
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise click.UsageError(f"{text!r} is not a date: expected one such as 2026-01-31") from None
    return int((time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp())


@click.command()
@click.argument("name")
@click.option("--document", metavar="ID", help="The document with this id, now and later.")
@click.option(
    "--where",
    "conditions",
    multiple=True,
    metavar="CONDITION",
    help="source=NUMBER or source=PATH: documents of this source; before=DATE: first seen before. Given twice, both "
    "must match.",
)
@click.option(
    "--containing",
    metavar="TEXT",
    help="Documents that contain this text, now and later. Only hashes of the text are stored.",
)
@click.option("--ignore-case", is_flag=True, help="Find the text of --containing in any case.")
@click.option("--later", is_flag=True, help="Write the rule for later documents even if none matches now.")
@click.option("--force", is_flag=True, help="Remove even more than a tenth of the documents.")
@click.option("--dry-run", is_flag=True, help="Print what would be removed, and remove nothing.")
@click.option("--reason", metavar="TEXT", help="Reason, as a note.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
def remove(
    name: str,
    conditions: tuple[str, ...],
    later: bool,
    force: bool,
    dry_run: bool,
    reason: str | None,
    yes: bool,
    as_json: bool,
    **criteria: Any,
) -> None:
    """Take documents down: the next rebuild and all later ones exclude them, whichever file contains them.

    Their texts stay out under other roles, too, and so do conversations that begin with them. The sources are scanned
    first. When the command ends, the documents are gone from live logs and the memory of their writers. Other sources
    and existing stores do not change: `draftstore corpus prove-removed` lists what still holds the texts, and
    `draftstore corpus restore` takes the removal back.

    If no document matches, nothing is written and the exit status is 1. Without --force, the same holds if --where or
    --containing would remove more than ten documents that are more than a tenth of the collection.

    \b
    Examples:
      draftstore corpus remove chat --document chatcmpl-5f1c
      draftstore corpus remove chat --where source=2 --where before=2026-01-31
      draftstore corpus remove chat --containing "jane@example.com" --ignore-case --dry-run
      draftstore corpus remove chat --containing "jane@example.com" --later --reason "asked on 3 May"
    """
    with catalogue_session() as session:
        collection = collecting.get_collection(session, name)
    where = _where(collection, conditions)
    if sum([criteria["document"] is not None, bool(where), criteria["containing"] is not None]) != 1:
        raise click.UsageError("give one of --document, --where and --containing")
    if criteria["ignore_case"] and criteria["containing"] is None:
        raise click.UsageError("--ignore-case is an option of --containing")
    scan = scan_with_progress(collection, collecting.open_tokenizer(collection))
    warn_of_problems(scan)
    with status("reading the documents"):
        found = select_documents(collection, scan, **where, **criteria)
    force_needed = found.many and criteria["document"] is None
    what = _matched(name, found, later=later, allowed=force or dry_run or not force_needed)
    fields: dict[str, Any] = {
        "removal": None, "documents": found.removal.documents, "active": found.wanted, "contained": found.contained,
        "other_case": found.other_case, "force_needed": force_needed, "later": bool(found.removal.rule),
    }  # fmt: skip
    if dry_run:
        needed = "; --force would be needed" if force_needed else ""
        return print_result(fields, as_json, f"would be removed from {name}: {what}{needed}")
    if not yes:
        confirm(f"{what}: remove them from {name}?")
    with catalogue_session() as session:
        fields["removal"] = write_removal(session, name, found.removal, reason).id
        collection = collecting.get_collection(session, name)
    text = f"removal {fields['removal']}: {what}; the next rebuild will exclude them"
    if live_logs(collection):
        try:
            fields["overwritten"] = forget(collection, scan)
        except (DraftstoreError, OSError) as error:
            raise CorpusError(
                f"removal {fields['removal']} is written, but not all live logs forgot: {error}"
            ) from None
        text += f"; {counted(fields['overwritten'], 'document')} of live logs overwritten"
    return print_result(fields, as_json, text)


def _matched(name: str, found: Selection, *, later: bool, allowed: bool) -> str:
    """Return what matched in words; CorpusError if that is nothing, without a rule for `later`, or not `allowed`."""
    if found.other_case:
        more = counted(found.other_case, "further document")
        say(f"{more} with the text in other case: --ignore-case includes them", err=True)
    documents, rule = found.removal.documents, found.removal.rule
    if not documents and not (later and rule):
        advice = "--later writes a rule for documents to come" if rule else "a line number makes no rule"
        raise CorpusError(f"no document of {name} matches, nothing is written: {advice}")
    what = f"{counted(documents, 'document')} matched ({found.wanted:,} active)"
    what += f", and {found.contained:,} more that repeat them" if found.contained else ""
    if not allowed:
        raise CorpusError(f"{what}: more than a tenth of {name}; nothing is written without --force")
    return what


@click.command("prove-removed")
@click.argument("name")
@click.option(
    "--vouch",
    "things",
    multiple=True,
    metavar="ID|DIR",
    help="Vouch for a live build, or the folder of a live log, that cannot be checked; valid until the next removal. "
    "May be repeated.",
)
@json_option
def prove(name: str, things: tuple[str, ...], as_json: bool) -> None:
    """Prove that no live build holds removed documents, by the digests of the documents that it was built from.

    Live builds of every release are checked; those made from the collection must hold only active documents. Live logs
    and the memory of the processes that write them are checked too. Run it after the rebuild. If a build or log holds
    removed documents, or cannot be checked and nobody vouched for it, the exit status is 5.

    \b
    Examples:
      draftstore corpus prove-removed chat
      draftstore corpus prove-removed chat --vouch 11
    """
    with catalogue_session() as session:
        collection = collecting.get_collection(session, name, lock=True)
        vouch(session, collection, things)
    scan = scan_with_progress(collection, collecting.open_tokenizer(collection))
    with status("comparing documents"), catalogue_session() as session:
        removed = removed_keys(collection, scan)
        checked = check_live_builds(session, collection, scan, removed)
    held = [(row, vouched(collection, row.place)) for row in check_live_logs(collection, scan)]
    unheld = (
        not (row.log or row.memory or ((row.unclear or row.damaged) and not said)) for row, said in held
    )
    proven = all(row.clean for row in checked) and all(unheld)
    if as_json:
        print_json(
            {
                "proven": proven,
                "documents": len(removed),
                "checked": [row._asdict() for row in checked],
                "live_logs": [row._asdict() | {"vouched": said} for row, said in held],
                "not_looked_at": LIMITS.partition(": ")[2],
            }
        )
    else:
        _show(name, len(removed), checked, held, proven)
    if not proven:
        raise click.exceptions.Exit(NOT_PROVEN)


def _show(
    name: str, removed: int, checked: list[Checked], held: list[tuple[Held, str | None]], proven: bool
) -> None:
    rows = []
    for row in checked:
        figures = (row.documents, row.removed, row.unwanted) if not row.problem else ("?", "?", "?")
        rows.append((row.build, row.kind, row.releases, *figures))
    columns = ("build", "kind", "live as", "documents", "removed", "not active")
    print_table(columns, rows, empty="no build is live")
    if held:
        print_table(("live log", *LOG_COLUMNS), [log for log, _ in held])
    for log, said in held:
        if (log.unclear or log.damaged) and not said:
            say(
                f"{log.place}: somebody must vouch for what cannot be compared: `--vouch {log.place}`",
                err=True,
            )
    for row in checked:
        if row.vouched:
            say(
                f"build {row.build} could not be checked; somebody vouched for it on {row.vouched:.10}",
                err=True,
            )
        elif not row.clean:
            say(f"build {row.build}: {row.problem or _advice(row)}", err=True)
    what = counted(removed, "removed document")
    if proven:
        say(
            f"proven for {name}: {what}; no live build holds one, or other inactive documents of the collection"
        )
    else:
        say(f"NOT proven for {name}: {what}", err=True)
    say(LIMITS, err=True)


def _advice(row: Checked) -> str:
    """Say what makes a live build clean."""
    if not row.releases:
        return f"count the n-grams again, or remove the counts: draftstore catalogue drop {row.build} --files"
    [first, *_] = row.releases
    return f"rebuild and publish {', '.join(row.releases)}, or remove the release: draftstore releases remove {first}"
