"""`draftstore corpus prove-removed`: proof that a take-down is complete."""

import click

from draftstore.cli.common import status
from draftstore.cli.output import json_option, print_json, print_table, say
from draftstore.errors import counted
from draftstore.live.removing import Held
from schema.cli.common import catalogue_session
from schema.cli.corpus_fields import scan_with_progress
from schema.collections import collecting
from schema.collections.live_logs import check_live_logs, removed_digests
from schema.collections.proving import Checked, check_live_builds, removed_keys, vouch

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
        removed = removed_keys(collection, scan)
        checked = check_live_builds(session, collection, scan, removed)
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
    """Print what was found in live builds and logs, and what to do about it."""
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
