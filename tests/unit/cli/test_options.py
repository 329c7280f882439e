"""The options for draft sources, as commands receive them."""

from pathlib import Path

import click
from click.testing import CliRunner, Result

from draftstore.assembly.sources import Sources
from draftstore.cli.options import takes

GIVEN: list[Sources] = []


@click.command()
@takes(sources=Sources)
def command(sources: Sources) -> None:
    """Note what it would draft from."""
    GIVEN.append(sources)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(command, arguments, catch_exceptions=False)


def test_every_option_arrives(tmp_path: Path) -> None:
    run()
    assert GIVEN.pop() == Sources()
    run(
        "--lookup", "a:1,b:2", "--release", "web", "--lookup-token", "t", "--lookup-deadline", "0.01",
        "--no-request", "--recycling", "--strategy", "longest", "--backend", "lmdb", "--store", str(tmp_path),
    )  # fmt: skip
    assert GIVEN.pop() == Sources(
        stores=(tmp_path,), strategy="longest", backend="lmdb", lookup="a:1,b:2", release="web", token="t",
        deadline=0.01, request=False, recycling=True,
    )  # fmt: skip
