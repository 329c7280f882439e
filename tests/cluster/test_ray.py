"""Builds on a real Ray cluster of two nodes on this machine: `make test-ray`."""

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("ray", reason="make test-ray installs Ray in .venv-ray")
from draftstore import errors
from tests.conftest import TRAINING_TEXT, small_tokenizer_folder
from tests.fakes.servers import free_port
from tests.fakes.waiting import until
from tests.unit.stores.rest.test_build import contents

BIN = Path(sys.executable).parent
FILES, DOCUMENTS = 6, 4_000
BUILD = (
    "build",
    "rest",
    "--glob",
    "*.jsonl",
    "--segment-tokens",
    "1000000",
    "--name",
    "texts",
    "--workers",
    "2",
)


class Node:
    """A node of one core; closing kills all its processes."""

    def __init__(self, folder: Path, *options: str, before: Sequence[str] = (), **environment: str) -> None:
        folder.mkdir()
        command = [
            *before,
            str(BIN / "ray"),
            "start",
            "--block",
            "--num-cpus=1",
            "--disable-usage-stats",
            *options,
        ]
        with (folder / "log").open("w") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, start_new_session=True, env=os.environ | environment
            )

    def close(self) -> None:
        if self._process.poll() is None:
            below = psutil.Process(self._process.pid).children(recursive=True)
            for process in [*below, self._process]:
                process.kill()
            self._process.wait()
            psutil.wait_procs(below)


class Grid:
    """A head, and other nodes."""

    def __init__(self, folder: Path) -> None:
        self.port, self.folder, self.nodes = head_port(), folder, list[Node]()
        self.address = f"127.0.0.1:{self.port}"
        head = "--head", f"--port={self.port}", "--include-dashboard=false", f"--temp-dir={folder / 'ray'}"
        self.head = Node(folder / "head", *head)
        until(lambda: self.alive() == 1, seconds=60)

    def add(self, **options: Any) -> Node:
        """Start a node, and wait until it has joined."""
        number = self.alive()
        node = Node(self.folder / f"node-{len(self.nodes)}", f"--address={self.address}", **options)
        self.nodes.append(node)
        until(lambda: self.alive() == number + 1, seconds=60)
        return node

    def alive(self) -> int:
        """Return the number of nodes; 0 before the head listens."""
        with socket.socket() as tried:
            if tried.connect_ex(("127.0.0.1", self.port)):
                return 0
        count = "print(sum(node['Alive'] for node in ray.nodes()))"
        code = f"import ray; ray.init({self.address!r}, log_to_driver=False); {count}"
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
        )
        found = done.stdout.split()[-1:]
        return int(found[0]) if found and found[0].isdigit() else 0

    def close(self) -> None:
        for node in [*self.nodes, self.head]:
            node.close()


def head_port() -> int:
    """Return a free port above those of Ray's workers."""
    return next(port for port in iter(free_port, None) if port > 19_999)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Grid]:
    """Start a head; its sockets need a short path."""
    made = Grid(tmp_path_factory.mktemp("g"))
    yield made
    made.close()


@pytest.fixture
def grid(head: Grid) -> Iterator[Grid]:
    """Return the head, to which tests add nodes of their own."""
    yield head
    for node in head.nodes:
        node.close()
    until(lambda: head.alive() == 1, seconds=60)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with texts and a tokenizer, and a store that this machine has built alone."""
    made = tmp_path_factory.mktemp("texts")
    (made / "texts").mkdir()
    salad, words = random.Random(0), " ".join(TRAINING_TEXT).split(" ")
    for number in range(FILES):
        with (made / "texts" / f"{number}.jsonl").open("w") as file:
            for _ in range(DOCUMENTS):
                print(json.dumps({"text": " ".join(salad.choices(words, k=200))}), file=file)
    small_tokenizer_folder(made / "tokenizer")
    assert draftstore(made, "alone").wait() == 0
    return made


def draftstore(folder: Path, name: str, *options: str, **environment: str) -> "subprocess.Popen[str]":
    """Start a build."""
    texts = "--corpus", str(folder / "texts"), "--tokenizer", str(folder / "tokenizer")
    command = [str(BIN / "draftstore"), *BUILD, *texts, "--out", str(folder / name), *options]
    own = {"SOURCE_DATE_EPOCH": "1"} | environment
    return subprocess.Popen(
        command, env=os.environ | own, text=True, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL
    )


def finished(build: "subprocess.Popen[str]") -> str:
    """Return what a build says, once it has ended."""
    return build.communicate(timeout=300)[1]


def parts(folder: Path, name: str) -> list[Path]:
    """Return what nodes have finished of a build."""
    partial = folder / f".{name}.partial"
    return [*partial.glob("tokens/parts-*/[0-9]*"), *partial.glob("parts/sorted-*")]


def test_two_nodes_build_the_same_bytes(grid: Grid, folder: Path) -> None:
    grid.add()
    said = finished(draftstore(folder, "apart", DRAFTSTORE_CLUSTER=grid.address))
    assert contents(folder / "apart") == contents(folder / "alone"), said
    assert not [*folder.glob(".apart*")]
    until(lambda: not busy(), seconds=30)


def busy() -> list[str]:
    """Return the processes that run parts."""
    names = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
    return [name for name in names if name.startswith("ray::") and "_call" in name]


@pytest.mark.parametrize("place", ["tokens/parts-*/[0-9]*", "parts/sorted-*"])
def test_a_build_survives_a_node(grid: Grid, folder: Path, place: str) -> None:
    node = grid.add()
    name = f"survivor-{place.partition('/')[0]}"
    build = draftstore(folder, name, "--cluster", grid.address)
    until(lambda: any((folder / f".{name}.partial").glob(place)), seconds=120)
    node.close()
    said = finished(build)
    assert contents(folder / name) == contents(folder / "alone"), said


def test_a_killed_build_resumes_from_its_parts(grid: Grid, folder: Path) -> None:
    build = draftstore(folder, "killed", "--cluster", grid.address)
    until(lambda: bool(parts(folder, "killed")), seconds=120)
    build.send_signal(signal.SIGKILL)
    finished(build)
    until(lambda: not busy(), seconds=30)
    before = {path: path.stat().st_ino for path in parts(folder, "killed")}
    again = draftstore(folder, "killed", "--cluster", grid.address)
    kept = set[Path]()
    while again.poll() is None:
        kept |= {path for path, inode in before.items() if path.exists() and path.stat().st_ino == inode}
        time.sleep(0.05)
    assert kept == {*before}
    assert contents(folder / "killed") == contents(folder / "alone"), finished(again)


def within(mount: str) -> tuple[str, ...]:
    """Return a command that begins one with another file system mounted; skips the test where nobody may."""
    command = "unshare", "--mount", "sh", "-c", f'{mount} && exec "$@"', "sh"
    if subprocess.run([*command, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount")
    return command


def test_a_node_with_other_sources_is_refused(grid: Grid, folder: Path, tmp_path: Path) -> None:
    package, copy = Path(errors.__file__).parent, tmp_path / "other"
    shutil.copytree(package, copy, ignore=shutil.ignore_patterns("__pycache__"))
    with (copy / "errors.py").open("a") as file:
        file.write("# changed\n")
    grid.add(before=within(f"mount --bind {copy} {package}"))
    said = finished(draftstore(folder, "changed", "--cluster", grid.address))
    assert (
        "cannot take part: its draftstore has other sources: install the same version on all nodes"
        in " ".join(said.split())
    )
    assert not (folder / "changed").exists()


def test_a_node_without_the_folder_is_refused(grid: Grid, folder: Path) -> None:
    grid.add(before=within(f"mount -t tmpfs none {folder}"))
    said = finished(draftstore(folder, "hidden", "--cluster", grid.address))
    assert f"cannot take part: it does not see {folder}" in " ".join(said.split())


def test_no_cluster(folder: Path) -> None:
    said = finished(draftstore(folder, "lonely", "--cluster", f"127.0.0.1:{free_port()}"))
    assert "no Ray cluster at 127.0.0.1:" in " ".join(said.split())
