"""The output of commands, with anything that names, places and reasons may contain."""

import json
import os
import subprocess
import sys
import time
import unicodedata
from contextlib import redirect_stdout
from io import StringIO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftstore.cli import common, output

TEXTS = st.text(st.characters(categories=["Cc", "Lu", "Zs"]), max_size=20)


@given(TEXTS)
def test_no_control_character_reaches_a_terminal(text: str) -> None:
    with redirect_stdout(StringIO()) as shown:
        output.say(text)
        output.print_table((text, "number"), [(text, 3), ([text], None)])
        output.print_fields({text: text, "nested": {text: text}})
    printed = shown.getvalue()
    assert {character for character in printed if unicodedata.category(character) == "Cc"} <= {"\n"}


def test_nothing_is_taken_for_markup(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_fields({"[bold]c[/red]": ":smile: \udcff"})
    output.print_json({"name": "\udcff"})
    shown, document = capsys.readouterr().out.splitlines()
    assert shown.split() == ["[bold]c[/red]", ":smile:", "�"]
    assert json.loads(document) == {"name": "\udcff"}


def test_rows_are_a_table_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"name": "a", "size": 12_345, "more": None}, {"name": "b", "size": 1, "more": ["x", "y"]}]
    columns: output.Columns = {"name": "name", "doubled": lambda row: row["size"] * 2, "more": "more"}
    output.print_rows(rows, columns, as_json=True)
    assert json.loads(capsys.readouterr().out) == rows
    output.print_rows(rows, columns, as_json=False)
    table = capsys.readouterr().out
    assert "│ a    │  24,690 │" in table
    assert "x, y" in table
    output.print_rows([], columns, as_json=False, empty="nothing here")
    assert capsys.readouterr().out == "nothing here\n"


def test_a_log_shows_long_steps(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(common, "LINE_SECONDS", 0.01)
    shown = ""

    def wait_for(line: str) -> None:
        nonlocal shown
        while line not in shown:  # the test's time limit ends it
            time.sleep(0.01)
            shown += capsys.readouterr().err

    with common.status("loading the model"):
        wait_for("loading the model\n")
    with common.progress_bars() as progress:
        progress("reading", "files")(1_000, 3_000)
        progress("sorting", "tokens")(0, None, "and more")
        wait_for("reading: 1,000 of 3,000 files; sorting: 0 tokens, and more\n")


def test_a_table_wider_than_the_terminal_is_a_block_for_each_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(output, "FILE_WIDTH", 20)
    output.print_table(("store", "M"), [("one", 1.5), ("two", 2)])
    assert "│ one   │ 1.5 │" in capsys.readouterr().out
    output.print_table(("store", "accepted length"), [("one", 1.5), ("two", 2)])
    blocks = capsys.readouterr().out.split("\n\n")
    assert [block.split() for block in blocks[-2:]] == [
        ["store", "one", "accepted", "1.5", "length"], ["store", "two", "accepted", "2", "length"]
    ]  # fmt: skip


@pytest.mark.parametrize("encoding", ["latin-1", "ascii", "utf-8"])
def test_output_fits_the_encoding_of_the_terminal(encoding: str) -> None:
    code = """
from draftstore.cli import output
output.fit_terminal()
output.say("\u251c\u2500 \u2423caf\u00e9 \u6771")
output.print_table(["\u6771"], [["\u251c\u2500 \u6771"]])
output.print_csv(["\u6771"], [["\u00e9"]])
"""
    variables = os.environ | {"PYTHONIOENCODING": encoding}
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.endswith("東\né\n".encode())
    if encoding == "latin-1":
        assert done.stdout.startswith("|- _café \\u6771\n".encode("latin-1"))
