"""`draftstore tokens`: bearer tokens of the lookup service."""

from pathlib import Path

import click
from rich.table import Table

from draftstore.cli.common import json_option, print_json, printable, stdout_console
from draftstore.errors import DraftstoreError
from draftstore.trees.frontier import MAX_BUDGET
from services.common.permissions import EVERY, Grant, PermissionsError, hash_token, new_token, read_grants
from services.common.token_file import change_grants

file_option = click.option(
    "--file",
    "path",
    type=click.Path(path_type=Path, dir_okay=False),
    required=True,
    help="File of tokens, as given to `draftstore serve --tokens`.",
)


@click.group()
def tokens() -> None:
    """Give out bearer tokens for the lookup service, and take them back.

    A running service reads the file again when it gets SIGHUP.

    \b
    Examples:
      draftstore tokens new engine-1 --release chat-vicuna --file tokens.toml
      draftstore serve --tokens tokens.toml --listen 0.0.0.0:7781
    """


@tokens.command()
@click.argument("name")
@click.option(
    "--release",
    "releases",
    multiple=True,
    required=True,
    help=f"Release that the token allows; `{EVERY}` allows every release. May be repeated.",
)
@click.option(
    "--max-budget",
    type=click.IntRange(1, MAX_BUDGET),
    help="Most nodes of a draft for this token, in place of the limit of the service.",
)
@file_option
@json_option
def new(name: str, releases: tuple[str, ...], max_budget: int | None, path: Path, as_json: bool) -> None:
    """Make a token and print it, this once: the file keeps its hash alone.

    \b
    Example:
      draftstore tokens new engine-1 --release chat-vicuna --release code --file tokens.toml
    """
    if not name.strip() or not name.isprintable():
        raise DraftstoreError(f"{name!r} cannot be the name of a token: expected some visible text")
    if not all(releases):
        raise DraftstoreError(f"the name of a release is empty: expected one that is served, or {EVERY!r}")
    token = new_token()
    grant = Grant(name, frozenset(releases), hash_token(token), max_budget)

    def add(grants: list[Grant]) -> list[Grant]:
        if any(other.name == name for other in grants):
            raise PermissionsError(f"{path} already has a token {name!r}: remove it, or choose another name")
        return [*grants, grant]

    change_grants(path, add)
    if as_json:
        print_json({"name": name, "releases": sorted(releases), "token": token})
        return
    click.echo(token)
    click.echo("keep it now, it cannot be shown again; a running service accepts it after SIGHUP", err=True)


@tokens.command("list")
@file_option
@json_option
def list_tokens(path: Path, as_json: bool) -> None:
    """List who has a token, and for what.

    \b
    Example:
      draftstore tokens list --file tokens.toml
    """
    grants = read_grants(path)
    if as_json:
        shown = [(grant.name, sorted(grant.releases), grant.max_budget) for grant in grants]
        print_json([dict(zip(("name", "releases", "max_budget"), row, strict=True)) for row in shown])
        return
    table = Table("name", "releases", "most nodes", "hash")
    for grant in grants:
        most = "" if grant.max_budget is None else f"{grant.max_budget:,}"
        table.add_row(printable(grant.name), ", ".join(sorted(grant.releases)), most, f"{grant.digest[:12]}…")
    stdout_console().print(table if grants else "no tokens: nobody may ask for anything")


@tokens.command()
@click.argument("name")
@file_option
@json_option
def remove(name: str, path: Path, as_json: bool) -> None:
    """Take a token back.

    \b
    Example:
      draftstore tokens remove engine-1 --file tokens.toml
    """

    def drop(grants: list[Grant]) -> list[Grant]:
        kept = [grant for grant in grants if grant.name != name]
        if len(kept) == len(grants):
            known = ", ".join(grant.name for grant in grants) or "none"
            raise PermissionsError(f"{path} has no token {name!r}: it has {known}")
        return kept

    change_grants(path, drop)
    if as_json:
        print_json({"name": name, "removed": True})
    else:
        click.echo(f"the token {name} is removed; a running service refuses it after SIGHUP")
