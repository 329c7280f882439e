import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from functools import partial
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
import pytest
from click.testing import CliRunner

from draftstore.cli import Commands, cli, main
from draftstore.cli.query import draw_tree
from draftstore.errors import DraftstoreError
from draftstore.storage.manifest import load_manifest
from draftstore.text.tokenizer import TextTokenizer
from draftstore.trees.tree import LEVEL_PROBS, DraftTree
from tests.conftest import write_texts
from tests.fakes.llama_cpp import read_cache
from tests.fakes.waiting import until

COMMAND = [sys.executable, "-m", "draftstore"]


class Ran(NamedTuple):
    """What one call of the command gave."""

    status: int
    out: str
    err: str

    def json(self) -> Any:
        assert self.status == 0, self.err
        return json.loads(self.out)

    def error(self) -> str:
        """Return the one sentence of a failure."""
        assert self.status == 1
        assert self.out == ""
        *slow, line = self.err.splitlines()  # on a busy machine, what takes seconds is said before
        assert line.startswith("error: ")
        assert not any(each.startswith("error: ") for each in slow)
        assert "Traceback" not in line
        return line


class Runner:
    """Calls the command inside this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys

    def __call__(self, *arguments: object) -> Ran:
        self._monkeypatch.setattr(sys, "argv", ["draftstore", *map(str, arguments)])
        self._capsys.readouterr()
        try:
            main()
            status: Any = 0
        except SystemExit as stop:
            status = stop.code
        return Ran(status or 0, *self._capsys.readouterr())


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Runner:
    return Runner(monkeypatch, capsys)


@pytest.fixture
def tokenizer(small_tokenizer: TextTokenizer, tmp_path: Path) -> Path:
    path = tmp_path / "small-bpe"
    path.mkdir()
    small_tokenizer.save(path)
    return path


@pytest.fixture
def store(small_store: Path, tmp_path: Path) -> Path:
    shutil.copytree(small_store, tmp_path / "store")
    return tmp_path / "store"


@pytest.fixture
def replays(tmp_path: Path) -> Path:
    path = tmp_path / "replays.jsonl"
    records = [
        {"prompt": "def add(left,", "output": " right):\n    return left + right\n", "model": "coder"},
        {"prompt": [{"role": "user", "content": "hi"}], "output": "I am well, thank you.", "model": "chat"},
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def all_commands(group: click.Group, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found = [path]
    context = click.Context(group)
    for name in group.list_commands(context):
        command, inner = group.get_command(context, name), (*path, name)
        found += all_commands(command, inner) if isinstance(command, click.Group) else [inner]
    return found


@pytest.mark.parametrize("path", all_commands(cli), ids=" ".join)
def test_help_holds_an_example_that_parses(path: tuple[str, ...], run: Runner) -> None:
    ran = run(*path, "--help")
    assert (ran.status, ran.err) == (0, "")
    examples = re.findall(r"^ +draftstore (.*)$", ran.out, re.MULTILINE)
    assert examples or path == ("build",)
    for example in examples:
        command: click.Command = cli
        words = shlex.split(re.split(r" *(?:&&| [<>#] )", example)[0])
        while isinstance(command, click.Group):
            command = command.get_command(click.Context(command), words.pop(0)) or pytest.fail(example)
        command.make_context("example", words, parent=click.Context(cli, **cli.context_settings))


def test_help_lists_commands_by_title_with_full_summaries(run: Runner) -> None:
    listed = run("-h").out
    assert listed.index("\nFirst steps:\n  quickstart ") < listed.index(
        "\nCatalogue and renewal:\n  catalogue "
    )
    assert "\nCommands:" not in listed
    for group in ("", "releases", "catalogue", "corpus"):
        assert "..." not in run(*group.split(), "--help").out.partition("\nOptions:\n")[2]


def test_help_lists_the_options_that_few_need_last(run: Runner) -> None:
    usual, experts = run("worker", "--help").out.split("\nExpert options:\n")
    for option in ("--model ", "--store ", "--budget ", "--json", "--help"):
        assert f" {option}" in usual
    assert "  --grace-seconds " in experts
    assert "NAME\n" not in run("releases", "history", "--help").out.partition("\nOptions:\n")[2]


def test_a_shell_completes_commands_and_options() -> None:
    def answer(**variables: str) -> str:
        program = Path(sys.executable).with_name("draftstore")
        return subprocess.run([program], env=os.environ | variables, capture_output=True, text=True).stdout

    assert "complete" in answer(_DRAFTSTORE_COMPLETE="bash_source")
    for words, position, expected in (
        ("draftstore qu", "1", "plain,query"),
        ("draftstore query --bud", "2", "--budget"),
    ):
        asked = {"_DRAFTSTORE_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": position}
        assert expected in answer(**asked)


def test_the_worker_takes_names_of_vllm_too() -> None:
    command = cli.get_command(click.Context(cli), "worker")
    assert command is not None
    given = ["--model", "m", "--served-model-name", "chat", "--max-num-seqs", "3"]
    values = command.make_context("worker", given).params
    assert (values["name"], values["max_batch"]) == ("chat", 3)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["brew"], "No such command 'brew'"),
        (["query", "x", "--text", "t", "--strategy", "worst"], "'worst' is not one of 'backoff', 'deep', "),
        (["replay", "--replays", "x"], "Missing argument 'DIR...'"),
        (["replay", "--replays", "x", "--request"], "--request without a store needs --tokenizer"),
        (["replay", "--replays", "x", "--live"], "--live without a store needs --tokenizer"),
    ],
)
def test_wrong_usage_is_status_2(run: Runner, arguments: list[str], reason: str) -> None:
    ran = run(*arguments)
    assert ran.status == 2
    assert reason in ran.err
    assert "Traceback" not in ran.err


def build(run: Runner, tmp_path: Path, tokenizer: Path, *more: object, corpus: Path | None = None) -> Ran:
    corpus = corpus or write_texts(tmp_path / "c.jsonl", 8)
    out = tmp_path / "new"
    return run("build", "rest", "--corpus", corpus, "--tokenizer", tokenizer, "--out", out, *more)


def test_build_reports_the_store_and_skipped_texts(run: Runner, tmp_path: Path, tokenizer: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    write_texts(folder / "data.jsonl", 3)
    (folder / "x.py").write_text("print(1)\n")
    good, other = write_texts(tmp_path / "good.jsonl", 3), tmp_path / "other.jsonl"
    with good.open("a") as file:
        file.write('{"text": ""}\n{"text": " "}\nbad\n')
    other.write_text('{"content": "x"}\n')
    out = tmp_path / "s"
    command = ("build", "rest", "--corpus", good, other, folder, "--tokenizer", tokenizer, "--out", out)
    for reused in (False, True):
        ran = run(*command)
        flat = " ".join(ran.err.split())
        assert (ran.status, ran.out, "already built" in flat) == (0, f"{out}\n", reused)
        assert "2 bad records were skipped" in flat
        assert (f"{good}:line 6: not JSON" in flat) != reused
        assert f"no text in {other} " in flat
        assert "1 data file in folders was skipped (.jsonl): name it, or give the glob '*.jsonl' " in flat
    found = run(*command, "--json").json()
    assert (found["path"], found["counts"]) == (str(out), load_manifest(out).counts)
    assert (found["bad_records"], found["empty_documents"]) == (2, 2)
    assert (found["unread"], found["passed_over"]) == ([str(other)], {".jsonl": 1})
    assert re.search(r"2 bad records skipped\s+2 empty documents skipped", run("info", out).out)


def test_a_build_reports_records_that_a_condition_leaves_out(
    run: Runner, tmp_path: Path, tokenizer: Path
) -> None:
    rollouts, out = tmp_path / "1.jsonl", tmp_path / "s"
    rollouts.write_text("".join(f'{{"input": "q", "output": "{n}", "score": {n}}}\n' for n in range(3)))
    command: tuple[Any, ...] = ("build", "rest", "--corpus", rollouts, "--tokenizer", tokenizer, "--out", out)
    pair, where = ("--fields", "prompt=input,output=output"), ("--where", "score > 1")
    assert re.search(r"filtered out\s+2 records ", run(*command, *pair, *where).err)
    assert run(*command, *pair, *where, "--json").json()["filtered"] == 2
    assert "2 records filtered out" in run("info", out).out
    command = (*command[:2], "--overwrite", *command[2:])
    assert "3 records did not match `where`" in run(*command, *pair, "--where", "score > 9").err
    refused = run(*command, *pair, "--where", "score >")
    assert (refused.status, "--where: is not an SQL expression" in refused.err) == (2, True)
    refused = run(*command, *pair, "--where", "output > 1")
    assert refused.err.rstrip().endswith("cannot compare string with numeric type (i32) (--where)")
    assert "add --fields prompt=input,output=output" in run(*command).err


def test_many_corpora_after_one_option(run: Runner, tmp_path: Path, tokenizer: Path) -> None:
    paths = [write_texts(tmp_path / f"{name}.jsonl", 3, seed=i) for i, name in enumerate("abcd")]
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "x.py").write_text("print(1)\n")
    (tmp_path / "src" / "x.rs").write_text("fn main() {}\n")
    (tmp_path / "src" / "x.md").write_text("# x\n")
    ran = run(
        "build", "rest", "--corpus", *paths[:3], tmp_path / "src", "--glob", "*.py", "*.rs", "--out",
        tmp_path / "s", "--json", "--tokenizer", tokenizer, f"--corpus={paths[3]}",
    )  # fmt: skip
    assert ran.json()["counts"]["documents"] == 4 * 3 + 2
    sources = load_manifest(tmp_path / "s").corpus["sources"]
    assert sources == [*map(str, paths[:3]), str(tmp_path / "src"), str(paths[3])]


def test_build_errors(run: Runner, tmp_path: Path, tokenizer: Path) -> None:
    absent = build(run, tmp_path, tokenizer, corpus=tmp_path / "absent.jsonl")
    assert absent.error() == f"error: no such file or folder: {tmp_path}/absent.jsonl"
    (tmp_path / "bad.jsonl").write_text("bad\n")
    strict = build(run, tmp_path, tokenizer, "--strict", corpus=tmp_path / "bad.jsonl")
    assert "bad.jsonl:line 1: not JSON" in strict.err
    assert "no tokenizer at 'nowhere'" in build(run, tmp_path, Path("nowhere")).error()
    assert not list(tmp_path.glob("*new*")) + list(tmp_path.glob(".new*"))
    (tmp_path / "new").write_text("mine")
    other = build(run, tmp_path, tokenizer).error()
    assert "new exists and is another build: choose another folder, or replace it (--overwrite)" in other


def test_info(run: Runner, store: Path) -> None:
    ran = run("info", store)
    assert (ran.status, ran.err) == (0, "")
    for text in ("small (rest, format version 1)", "small-bpe, fingerprint", "tokens.bin", "uint16"):
        assert text in ran.out
    assert all(len(line) <= 160 for line in ran.out.splitlines())
    manifest = load_manifest(store)
    index = sum(entry.size for name, entry in manifest.files.items() if "/" not in name)
    an_entry = index / manifest.counts["entries"]
    assert (
        f"{manifest.size:,}: {index:,} ({an_entry:.2f} per entry), and " in ran.out
    )  # without the tokenizer
    document = json.loads((store / "manifest.json").read_text())
    assert run("info", store, "--json").json() == {"path": str(store), **document}


def test_verify(run: Runner, store: Path) -> None:
    assert re.fullmatch(rf"{store} is intact: 8 files, [\d,]+ bytes\n", run("verify", store).out)
    found = run("verify", store, "--json").json()
    assert (found["whole"], found["problems"]) == (True, [])
    path = store / "suffixes.bin"
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert f"{path} has SHA-256 " in run("verify", store).error()
    ran = run("verify", store, "--json")
    assert (ran.status, len(json.loads(ran.out)["problems"])) == (1, 1)


def test_query(run: Runner, store: Path, small_tokenizer: TextTokenizer) -> None:
    asked = ["query", store, "--text", "The quick brown", "--budget", "8"]
    head, *branches = run(*asked).out.splitlines()
    assert re.match(r"8 nodes in \d+ µs; longest match \d+ tokens, [\d,]+ times: '", head)
    assert branches[0].startswith("0.")
    found = run(*asked, "--json").json()
    assert found["context"] == small_tokenizer.encode("The quick brown", bos=False).tolist()
    assert len(found["nodes"]) == 8
    for position, node in enumerate(found["nodes"]):
        assert node["shown"] == small_tokenizer.token_text(node["token"])
        assert node["text"] == small_tokenizer.decode([node["token"]])
        assert -1 <= node["parent"] < position
        assert 0 < node["prob"] <= 1


def test_a_query_reads_standard_input(run: Runner, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "The quick\nbrown"
    expected = run("query", store, "--text", text, "--json").json()
    monkeypatch.setattr("sys.stdin", io.StringIO(text + "\n"))
    found = run("query", store, "--text", "-", "--json").json()
    assert [found[key] for key in ("context_text", "nodes")] == [
        expected[key] for key in ("context_text", "nodes")
    ]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff"), encoding="utf-8"))
    assert "on stdin is not UTF-8" in run("query", store, "--text", "-").error()


def test_a_tree_is_drawn_as_lines(small_tokenizer: TextTokenizer) -> None:
    ids = [int(small_tokenizer.encode(letter, bos=False)[0]) for letter in "abcdefgh"]
    parents, levels = [-1, 0, 1, 1, 2, 2, 4, -1], [0, 16, 32, 48, 64, 80, 96, 112]
    tree = DraftTree(np.array(ids, np.int32), np.array(parents, np.int16), np.array(levels, np.uint8))
    assert LEVEL_PROBS[16] == 0.5
    assert draw_tree(tree, small_tokenizer).splitlines() == [
        "1.000…0.500  a·b",
        "├─ 0.250  c",
        "│  ├─ 0.062…0.016  e·g",
        "│  └─ 0.031  f",
        "└─ 0.125  d",
        "0.008  h",
    ]


def test_replay_as_json(run: Runner, store: Path, replays: Path) -> None:
    found = run("replay", store, "--replays", replays, "--json", "--budget", 9).json()
    assert (found["store"], found["strategy"], found["budget"]) == (str(store), "backoff", 9)
    assert found["accepted_length"] == round(found["tokens"] / found["passes"], 4) >= 1
    assert 0 < found["nodes_mean"] <= 9
    plain = run("replay", store, "--replays", replays, "--json", "--budget", 0).json()
    assert (plain["accepted_length"], plain["miss_rate"], plain["nodes_mean"]) == (1.0, 1.0, 0.0)
    assert (plain["tokens"], plain["rows"]) == (found["tokens"], 2)


@pytest.fixture
def echoes(tmp_path: Path) -> Path:
    """Write a recording whose output repeats its prompt, which no store knows."""
    path = tmp_path / "echoes.jsonl"
    line = "zebra 17 quartz 23 fjord 99 vowel 4 sphinx 61 judge"
    path.write_text(json.dumps({"prompt": f"Say: {line}.\n", "output": f"{line}. {line}."}) + "\n")
    return path


def test_replay_with_the_request(
    run: Runner, store: Path, small_crest: Path, tokenizer: Path, echoes: Path
) -> None:
    """It joins the drafts of every store."""
    arguments = ["replay", store, small_crest, "--replays", echoes, "--json"]
    alone = [json.loads(line) for line in run(*arguments).out.splitlines()]
    mixed = [json.loads(line) for line in run(*arguments, "--request").out.splitlines()]
    assert [figures["store"] for figures in mixed] == [str(store), str(small_crest)]
    for before, after in zip(alone, mixed, strict=True):
        assert after["strategy"] == before["strategy"] == "backoff"
        assert after["accepted_length"] > 2 * before["accepted_length"]
        assert after["tokens"] == before["tokens"]
    ran = run("replay", store, "--replays", echoes, "--request", "--strategy", "longest")
    assert re.search(r"small +│ longest \+ request +│ +64 ", ran.out)
    ran = run("replay", "--request", "--tokenizer", tokenizer, "--replays", echoes)
    assert re.search(r"none +│ request +│ +64 ", ran.out)


def test_replay_learns_from_the_outputs_before(
    run: Runner, store: Path, tokenizer: Path, echoes: Path
) -> None:
    """The first finds nothing to learn from; of the next each finds the one before, if there is room for it."""
    echoes.write_text(echoes.read_text() * 3)
    alone = ["replay", "--tokenizer", tokenizer, "--replays", echoes]
    first, later = (run(*alone, "--live", "--json", *more).json() for more in (["--limit", 1], []))
    assert (first["accepted_length"], first["live"], first["request"]) == (1.0, 1_000_000, False)
    assert later["passes"] < 1.2 * first["passes"] + 4
    assert run(*alone, "--json", "--live", 3).json()["accepted_length"] < 1.1
    asked = ["replay", store, "--replays", echoes, "--request"]
    before, after = (run(*asked, "--json", *more).json() for more in ([], ["--live"]))
    assert after["passes"] < before["passes"]
    assert before["live"] is None
    assert re.search(r"small +│ backoff \+ request \+ live +│ +64 ", run(*asked, "--live").out)


def test_a_cache_for_llama_cpp(run: Runner, small_store: Path, tmp_path: Path) -> None:
    out = tmp_path / "cache.bin"
    found = run("export", "llama-cpp", small_store, "--out", out, "--max-bytes", "2kB", "--json").json()
    assert (found["path"], found["bytes"]) == (str(out), out.stat().st_size)
    assert found["ngrams"] == len(read_cache(out)) == 2000 // 28
    assert found["omitted"] > 0
    assert "exists" in run("export", "llama-cpp", small_store, "--out", out).error()
    ran = run("export", "llama-cpp", small_store, "--out", out, "--overwrite", "--min-count", 3)
    assert (ran.status, ran.out) == (0, f"{out}\n")
    assert f"{len(read_cache(out)):,} pairs" in ran.err


@pytest.mark.data
def test_ten_answers_are_compared(
    run: Runner, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    arguments = ["demo", "--model", data / "models" / "stories260K", "--max-tokens", 12]
    found = run(*arguments, "--json").json()
    answers = found["answers"]
    assert [row["kind"] for row in answers] == ["edit"] * 5 + ["question"] * 5
    for row in answers:
        assert row["same_text"]
        assert row["passes"] <= row["plain_passes"] == row["tokens"] - 1
        assert row["gain"] == pytest.approx(row["plain_seconds"] / row["seconds"], rel=0.5)
    assert found["median_gain"].keys() == found["median_M"].keys() == {"edit", "question"}
    machine = found["machine"]
    assert bool(found["doubt"]) == (machine["load_average"] > machine["cores"] or machine["spread"] > 0.2)
    assert list(tmp_path.iterdir()) == []  # neither a model nor a curve is left


def test_not_a_store(run: Runner, tmp_path: Path, replays: Path) -> None:
    for path in (tmp_path, tmp_path / "absent", replays):
        for ran in (
            run("info", path),
            run("verify", path),
            run("query", path, "--text", "x"),
            run("replay", path, "--replays", replays),
        ):
            assert ran.error().startswith(f"error: {path} is not a store: ")


def test_a_foreign_tokenizer(run: Runner, store: Path, tokenizer: Path, replays: Path) -> None:
    assert run("query", store, "--text", "x", "--tokenizer", tokenizer).status == 0
    path = tokenizer / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"normalizer": {"type": "Lowercase"}}))
    expected = r"was built with tokenizer 'small-bpe' \(fingerprint \w{12}\), found 'small-bpe' \(\w{12}\)"
    for arguments in (["query", store, "--text", "x"], ["replay", store, "--replays", replays]):
        assert re.search(expected, run(*arguments, "--tokenizer", tokenizer).error())


@pytest.mark.slow
def test_ctrl_c_is_status_130(tmp_path: Path, tokenizer: Path) -> None:
    corpus = write_texts(tmp_path / "c.jsonl", 100_000)
    command: list[Any] = [
        *COMMAND, "build", "rest", "--corpus", corpus, "--tokenizer", tokenizer, "--out", tmp_path / "s",
    ]  # fmt: skip
    # A job in the background ignores Ctrl-C.
    foreground = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, preexec_fn=foreground) as process:
        until((tmp_path / ".s.partial" / "tokens").exists)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert err.strip().endswith("interrupted: run the same command again to resume")
    assert "Traceback" not in err
    assert not (tmp_path / "s").exists()


def test_a_reader_that_has_gone(store: Path) -> None:
    read, write = os.pipe()
    os.close(read)  # before a byte is written, as `| true` may
    command = [*COMMAND, "query", str(store), "--text", "The"]
    ran = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert ran.returncode != 0
    assert set(ran.stderr.splitlines()) <= {"compiling kernels (once per installation)"}


def test_a_command_of_a_missing_package_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    entry_point = EntryPoint("serve", "no_such_package.commands:serve", "draftstore.commands")
    monkeypatch.setattr(Commands, "added", {"serve": entry_point})
    assert CliRunner().invoke(cli, ["--help"]).exit_code == 0
    result = CliRunner().invoke(cli, ["serve", "--port", "1", "there"])
    assert isinstance(result.exception, DraftstoreError)
    assert "pip install 'draftstore[no_such_package]'" in str(result.exception)
