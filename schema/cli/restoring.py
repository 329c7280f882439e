"""`draftstore corpus restore`: the end of a removal."""

import click

from draftstore.cli.output import json_option, print_result
from draftstore.errors import counted
from schema.cli.common import catalogue_session, confirm
from schema.cli.corpus_fields import put_in_force
from schema.collections import collecting
from schema.collections.removing import restoration_of


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
    put_in_force(name, row, reason, scan=None)
    text = (
        f"removal {removal} is taken back: the next rebuild includes its {size} again, unless another removal "
        "refuses them; answers overwritten in live logs do not come back"
    )
    print_result({"removal": row.id, "restores": removal, "documents": row.documents}, as_json, text)
