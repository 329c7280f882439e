"""`draftstore corpus remove`, `restore` and `prove-removed`: take-down, its end, and proof that it is complete."""

from datetime import UTC, datetime
from typing import Annotated, Any

import click
from pydantic import Field

from draftstore.cli.common import progress_bars, status
from draftstore.cli.options import takes
from draftstore.cli.output import json_option, print_json, print_result, print_table, say
from draftstore.errors import CorpusError, DraftstoreError, counted
from draftstore.live.removing import Held
from draftstore.options import Options, Shown
from draftstore.storage.report import passed_over_text
from draftstore.text.scans import Scan
from draftstore.text.wanted import Removal
from schema.cli.common import catalogue_session, confirm
from schema.collections import collecting
from schema.collections.live_logs import check_live_logs, forget, live_logs, removed_digests
from schema.collections.models import Collection, CollectionRemoval
from schema.collections.proving import Checked, check_live_builds, vouch
from schema.collections.removing import Selection, restoration_of, select_documents, write_removal

NOT_PROVEN = 5
"""Exit status if a live build or log holds removed documents, or cannot be checked and nobody vouched for it."""
BUILD_COLUMNS = ("build", "kind", "live as", "documents", "removed", "not active")
LOG_COLUMNS = (
    "live log", "removed documents", "processes that may hold some", "not comparable", "damaged bytes",
)  # fmt: skip
LIMITS = (
    "not checked: the sources themselves, except live logs; builds that are not live; backups and copies of stores or "
    "of the database; logs; and the memory of lookup services and decoders until they follow the release"
)


class Removing(Options):
    """What to remove, and how."""

    document: Annotated[str | None, Shown(metavar="ID")] = Field(
        None, description="The document with this id, now and later."
    )
    where: Annotated[tuple[str, ...], Shown(metavar="CONDITION")] = Field(
        (),
        description="source=NUMBER or source=PATH: documents of this source; before=DATE: first seen before. Given "
        "twice, both must match.",
    )
    containing: Annotated[str | None, Shown(metavar="TEXT")] = Field(
        None,
        description="Documents that contain this text, now and later. Only hashes of the text are stored.",
    )
    ignore_case: bool = Field(False, description="Find the text of --containing in any case.")
    later: bool = Field(False, description="Write the rule for later documents even if none matches now.")
    force: bool = Field(False, description="Remove even more than a tenth of the documents.")
    dry_run: bool = Field(False, description="Print what would be removed, and remove nothing.")
    reason: Annotated[str | None, Shown(metavar="TEXT")] = Field(None, description="Reason, as a note.")


def _where(collection: Collection, conditions: tuple[str, ...]) -> dict[str, Any]:
    places = {row.place: row.id for row in collection.sources}
    read = {"source": lambda value: places.get(value) or int(value), "before": _seconds}
    found: dict[str, Any] = {}
    for condition in conditions:
        key, _, value = condition.partition("=")
        try:
            found[key] = read[key](value)
        except (KeyError, ValueError):
            raise click.UsageError(
                f"--where {condition}: expected source=NUMBER, source=PATH or before=2026-01-31; "
                f"`draftstore corpus show {collection.name}` lists the sources"
            ) from None
    return found


def _seconds(text: str) -> int:
    time = datetime.fromisoformat(text)
    return int((time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp())


@click.command()
@click.argument("name")
@takes(options=Removing)
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
def remove(name: str, options: Removing, yes: bool, as_json: bool) -> None:
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
    where, text = _where(collection, options.where), options.containing
    if sum([options.document is not None, bool(where), text is not None]) != 1:
        raise click.UsageError("give one of --document, --where and --containing")
    if options.ignore_case and text is None:
        raise click.UsageError("--ignore-case is an option of --containing")
    scan = scan_with_progress(collection)
    warn_of_problems(scan)
    with status("reading the documents"):
        by = Removal(document=options.document, **where) if text is None else text
        found = select_documents(collection, scan, by, ignore_case=options.ignore_case)
    what = _matched(name, found, options)
    overwritten, removal = None, found.removal
    if options.dry_run:
        said = f"would be removed from {name}: {what}" + ("; --force would be needed" if found.many else "")
    else:
        if not yes:
            confirm(f"{what}: remove them from {name}?")
        overwritten = _put_in_force(name, removal, options.reason, scan)
        said = f"removal {removal.id}: {what}; the next rebuild will exclude them"
    fields = {
        "removal": removal.id, "documents": removal.documents, "active": found.wanted, "contained": found.contained,
        "other_case": found.other_case, "force_needed": found.many, "later": bool(removal.rule),
    }  # fmt: skip
    if overwritten is not None:
        fields["overwritten"] = overwritten
        said += f"; {counted(overwritten, 'document')} of live logs overwritten"
    print_result(fields, as_json, said)


def _matched(name: str, found: Selection, options: Removing) -> str:
    """Return what matched in words; CorpusError if that is nothing to write, or needs `--force`."""
    if found.other_case:
        more = counted(found.other_case, "further document")
        say(f"{more} with the text in other case: --ignore-case includes them", err=True)
    documents, rule = found.removal.documents, found.removal.rule
    if not documents and not (options.later and rule):
        advice = "--later writes a rule for documents to come" if rule else "a line number makes no rule"
        raise CorpusError(f"no document of {name} matches, nothing is written: {advice}")
    what = f"{counted(documents, 'document')} matched ({found.wanted:,} active)"
    what += f", and {found.contained:,} more that repeat them" if found.contained else ""
    if found.many and not options.force and not options.dry_run:
        raise CorpusError(f"{what}: more than a tenth of {name}; nothing is written without --force")
    return what


@click.command()
@click.argument("name")
@click.argument("removal", type=int)
@click.option("--reason", metavar="TEXT", help="Reason, as a note.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
def restore(name: str, removal: int, reason: str | None, yes: bool, as_json: bool) -> None:
    """Take the removal with this id back: the next rebuild includes its documents again, as far as sources have them.

    A document that another removal refuses stays out. Answers that were overwritten in live logs do not come back. A
    removal of the same documents afterwards is a new one, in force.

    \b
    Example:
      draftstore corpus restore chat 2 --reason "it was another Jane"
    """
    with catalogue_session() as session:
        collection = collecting.get_collection(session, name)
    row = restoration_of(collection, removal)
    size = counted(row.documents, "document")
    if not yes:
        confirm(f"take removal {removal} of {name} back ({size})? Overwritten live answers do not come back")
    _put_in_force(name, row, reason, scan=None)
    text = (
        f"removal {removal} is taken back: the next rebuild includes its {size} again, unless another removal "
        "refuses them; answers overwritten in live logs do not come back"
    )
    print_result({"removal": row.id, "restores": removal, "documents": row.documents}, as_json, text)


@click.command("prove-removed")
@click.argument("name")
@click.option(
    "--vouch",
    "things",
    multiple=True,
    metavar="ID|DIR",
    help="Vouch for a live build, or the folder of a live log, that cannot be checked; valid for this collection until "
    "its next removal. May be repeated.",
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
    scan = scan_with_progress(collection)
    with status("comparing documents"), catalogue_session() as session:
        documents = len(removed_digests(collection, scan)["digest"])
        checked = check_live_builds(session, collection, scan)
    held = check_live_logs(collection, scan)
    proven = all(row.clean for row in checked) and all(row.clean for row in held)
    if as_json:
        print_json({
            "proven": proven, "documents": documents, "checked": [row._asdict() for row in checked],
            "live_logs": [row._asdict() for row in held], "not_looked_at": LIMITS.partition(": ")[2],
        })  # fmt: skip
    else:
        _show(checked, held)
        what = f"proven for {name}: {counted(documents, 'removed document')}"
        if proven:
            which = (
                "live build that could be checked" if any(row.vouched for row in checked) else "live build"
            )
            say(f"{what}; no {which} holds one, or other inactive documents of the collection")
        else:
            say(f"NOT {what}", err=True)
        say(LIMITS, err=True)
    if not proven:
        raise click.exceptions.Exit(NOT_PROVEN)


def _show(checked: list[Checked], held: list[Held]) -> None:
    rows = [(*row[:3], *(("?",) * 3 if row.problem else row[3:6])) for row in checked]
    print_table(BUILD_COLUMNS, rows, empty="no build is live")
    if held:
        print_table(LOG_COLUMNS, [row[:-1] for row in held])
    for log in held:
        if log.unclear or (log.damaged and not log.vouched):
            advice = f"somebody must vouch for what cannot be compared: `--vouch {log.place}`"
            say(f"{log.place}: {advice}", err=True)
    for row in checked:
        if row.vouched:
            advice = f"could not be checked; somebody vouched for it on {row.vouched:.10}"
            say(f"build {row.build} {advice}", err=True)
        elif not row.clean:
            say(f"build {row.build}: {row.problem or _advice(row)}", err=True)


def _advice(row: Checked) -> str:
    if not row.releases:
        return f"count the n-grams again, or remove the counts: draftstore catalogue drop {row.build} --files"
    [first, *_] = row.releases
    return f"rebuild and publish {', '.join(row.releases)}, or remove the release: draftstore releases remove {first}"


def scan_with_progress(collection: Collection) -> Scan:
    """Scan a collection, with a progress bar."""
    tokenizer = collecting.open_tokenizer(collection)
    with progress_bars() as progress:
        step = progress("scanning", "files")
        return collecting.scan_collection(collection, tokenizer, on_progress=step)


def warn_of_problems(found: Scan) -> None:
    """Report on stderr which records of a scan could not be read and which links were not followed."""
    report = found.report
    if report.passed_over:
        say(passed_over_text(report.passed_over), err=True)
    if report.bad_records:
        first = f"{report.problems[0].place}: {report.problems[0].reason}"
        say(f"{counted(report.bad_records, 'bad record')}, the first one {first}", err=True)


def _put_in_force(name: str, removal: CollectionRemoval, reason: str | None, scan: Scan | None) -> int | None:
    """Write a removal, or its end; return how many documents of live logs are overwritten, None without such logs."""
    with catalogue_session() as session:
        write_removal(session, name, removal, reason)
        collection = collecting.get_collection(session, name)
    if not live_logs(collection):
        return None
    try:
        return forget(collection, scan_with_progress(collection) if scan is None else scan)
    except (DraftstoreError, OSError) as error:
        raise CorpusError(f"removal {removal.id} is written, but not all live logs forgot: {error}") from None
