"""The options for sources of drafts, as commands get them."""

from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from draftstore.assembly import Sources
from draftstore.cli.sources import source_options


def given(*arguments: str) -> Sources:
    """Return what a command with these arguments would draft from."""
    got: list[Sources] = []

    def command(sources: Sources) -> None:
        got.append(sources)

    result = CliRunner().invoke(click.command()(source_options(command)), arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return got[0]


def test_every_option_arrives(tmp_path: Path) -> None:
    assert given() == Sources(request=True)
    assert given(
        "--lookup", "a:1,b:2", "--release", "web", "--lookup-token", "t", "--lookup-deadline", "0.01",
        "--no-request", "--recycling", "--strategy", "longest", "--backend", "lmdb", "--store", str(tmp_path),
    ) == Sources(
        stores=(tmp_path,), strategy="longest", backend="lmdb", lookup="a:1,b:2", release="web", token="t",
        deadline=0.01, recycling=True,
    )  # fmt: skip


@pytest.mark.parametrize("seconds", ["0", "-1", "61", "soon"])
def test_deadlines_that_cannot_be(seconds: str) -> None:
    result = CliRunner().invoke(
        click.command()(source_options(lambda sources: None)), ["--lookup-deadline", seconds]
    )
    assert result.exit_code == 2
