"""`draftstore tokens`: bearer tokens of the services."""

from pathlib import Path
from typing import Annotated, Any

import click
from pydantic import Field

from draftstore.cli.options import Group, takes
from draftstore.cli.output import json_option, print_result, print_rows, say
from draftstore.errors import DraftstoreError
from draftstore.options import Options, Shown
from draftstore.trees.frontier import MAX_BUDGET
from services.common.permissions import (
    EVERY,
    Grant,
    PermissionsError,
    change_grants,
    hash_token,
    new_token,
    read_grants,
)


class TokenFile(Options):
    """The token file."""

    file: Path = Field(description="File of tokens, as given to `draftstore serve --tokens`.")


class NewToken(TokenFile):
    """What a token allows."""

    releases: Annotated[tuple[str, ...], Shown(flags=("--release",))] = Field(
        description=f"Release that the token allows; `{EVERY}` allows every release. May be repeated."
    )
    appends: Annotated[tuple[str, ...], Shown(flags=("--append",), metavar="LIVE")] = Field(
        (),
        description=f"Live store that the token may append to (`{EVERY}` for all); drafting from it also needs "
        "--release LIVE. May be repeated.",
    )
    max_budget: int | None = Field(
        None,
        ge=1,
        le=MAX_BUDGET,
        description="Maximum nodes per draft with this token, instead of the service's limit.",
    )


@click.group(cls=Group)
def tokens() -> None:
    """Issue and revoke bearer tokens for the lookup service.

    A running service reloads the file on SIGHUP.

    \b
    Examples:
      draftstore tokens new engine-1 --release chat-vicuna --file tokens.toml
      draftstore serve --tokens tokens.toml --listen 0.0.0.0:7781
    """


@tokens.command()
@click.argument("name")
@takes(options=NewToken)
@json_option
def new(name: str, options: NewToken, as_json: bool) -> None:
    """Create a token and print it once: the file stores only its hash.

    \b
    Example:
      draftstore tokens new engine-1 --release chat-vicuna --release code --file tokens.toml
      draftstore tokens new engine-2 --release team --append team --file tokens.toml
    """
    if not name.strip() or not name.isprintable():
        raise DraftstoreError(f"{name!r} cannot be the name of a token: expected some visible text")
    if "" in (*options.releases, *options.appends):
        raise DraftstoreError(f"the name of a release is empty: `{EVERY}` stands for all of them")
    token = new_token()
    grant = Grant(
        name, frozenset(options.releases), hash_token(token), options.max_budget, frozenset(options.appends)
    )

    def add(grants: list[Grant]) -> list[Grant]:
        if any(other.name == name for other in grants):
            raise PermissionsError(
                f"{options.file} already has a token {name!r}: remove it, or choose another name"
            )
        return [*grants, grant]

    change_grants(options.file, add)
    print_result(_public(grant) | {"token": token}, as_json, token)
    if not as_json:
        say("save it now: it cannot be shown again; a running service accepts it after SIGHUP", err=True)


def _public(grant: Grant) -> dict[str, Any]:
    return {"name": grant.name, "releases": sorted(grant.releases), "appends": sorted(grant.appends)}


@tokens.command("list")
@takes(options=TokenFile)
@json_option
def list_tokens(options: TokenFile, as_json: bool) -> None:
    """List tokens and what they allow.

    \b
    Example:
      draftstore tokens list --file tokens.toml
    """
    rows = [{**_public(each), "max_budget": each.max_budget} for each in read_grants(options.file)]
    columns = {"name": "name", "releases": "releases", "appends": "appends", "max nodes": "max_budget"}
    print_rows(rows, columns, as_json, empty="no tokens: every request is refused")


@tokens.command()
@click.argument("name")
@takes(options=TokenFile)
@json_option
def remove(name: str, options: TokenFile, as_json: bool) -> None:
    """Revoke a token.

    \b
    Example:
      draftstore tokens remove engine-1 --file tokens.toml
    """

    def drop(grants: list[Grant]) -> list[Grant]:
        kept = [grant for grant in grants if grant.name != name]
        if len(kept) == len(grants):
            known = ", ".join(grant.name for grant in grants) or "none"
            raise PermissionsError(f"{options.file} has no token {name!r}: it has {known}")
        return kept

    change_grants(options.file, drop)
    text = f"the token {name} is removed; a running service refuses it after SIGHUP"
    print_result({"name": name, "removed": True}, as_json, text)
