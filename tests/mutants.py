"""Mutation testing: forty small faults in the core, which the tests of their rooms must catch (`make test-mutants`).

A seeded draw over rooms chooses comparisons, constants and calls; each is changed in a copy of the checkout, where the
tests of the room, then those of the rooms that import it, run until one fails. `--seed` draws other faults.
"""

import argparse
import ast
import os
import queue
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
ROOMS = {
    "draftstore/search": "search",
    "draftstore/trees": "trees",
    "draftstore/decoding": "decoding",
    "draftstore/storage": "storage",
    "draftstore/remote": "remote",
    "services/common/permissions.py": "common",
}
SECONDS = 300
SWAPPED = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "is": "is not", "is not": "is"}
COMPARISONS = ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Eq, ast.NotEq, ast.Is, ast.IsNot
SIGNS: dict[type[ast.cmpop], str] = dict(zip(COMPARISONS, SWAPPED, strict=True))


class Mutant(NamedTuple):
    """One changed place of a module; `line` counts from 1, columns are bytes."""

    path: Path
    line: int
    begin: int
    end: int
    text: str

    @property
    def room(self) -> str:
        """The room that its module belongs to."""
        return next(room for room in ROOMS if self.path.is_relative_to(ROOT / room))


def mutants_of(path: Path) -> Iterator[Mutant]:
    """Yield every place of the functions of a module that can be changed."""
    source = path.read_bytes().splitlines()
    tree = ast.parse(path.read_text())
    messages = {
        inner for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for inner in ast.walk(node)
    }
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    inside = {inner for function in functions for line in function.body for inner in ast.walk(line)}
    for node in (node for node in ast.walk(tree) if node in inside - messages):
        if (
            not isinstance(node, ast.expr | ast.stmt)
            or node.end_lineno != node.lineno
            or node.end_col_offset is None
        ):
            continue
        line = node.lineno
        if isinstance(node, ast.Compare) and type(node.ops[0]) in SIGNS:
            sign = SIGNS[type(node.ops[0])]
            at = source[line - 1].find(f" {sign} ".encode(), node.left.end_col_offset)
            if at >= 0:
                yield Mutant(path, line, at + 1, at + 1 + len(sign), SWAPPED[sign])
        elif isinstance(node, ast.Constant) and type(node.value) in (int, bool):
            changed = str(not node.value) if isinstance(node.value, bool) else f"({ast.unparse(node)} + 1)"
            yield Mutant(path, line, node.col_offset, node.end_col_offset, changed)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield Mutant(path, line, node.col_offset, node.end_col_offset, "pass")


def drawn(seed: int, count: int) -> list[Mutant]:
    """Return mutants of all rooms in equal shares as far as they have places, no two of one line."""
    chance = random.Random(seed)
    found: list[Mutant] = []
    for number, room in enumerate(reversed(ROOMS)):  # small ones first: the others have more places
        paths = sorted((ROOT / room).glob("*.py")) or [ROOT / room]
        lines = {(mutant.path, mutant.line): mutant for path in paths for mutant in _shuffled(path, chance)}
        share = (count - len(found)) // (len(ROOMS) - number)
        found += chance.sample(list(lines.values()), min(share, len(lines)))
    return found


def _shuffled(path: Path, chance: random.Random) -> list[Mutant]:
    mutants = list(mutants_of(path))
    chance.shuffle(mutants)
    return mutants


def tests_of(room: str) -> list[str]:
    """Return the folders of the tests of a room, and after it of the rooms that import it."""
    module = room.removesuffix(".py").replace("/", ".")
    importing = {
        path.relative_to(ROOT).parts[1]
        for package in ("draftstore", "services", "schema")
        for path in (ROOT / package).rglob("*.py")
        if f"from {module}" in path.read_text()
    }
    folders = [ROOMS[room], *sorted(importing - {ROOMS[room]})]
    return [f"tests/unit/{folder}" for folder in folders if (ROOT / "tests/unit" / folder).is_dir()]


def run(copy: Path, mutant: Mutant) -> tuple[str, float]:
    """Return what tests say of a mutant in a copy of the checkout (caught, hangs, survived), and the seconds it took.

    It hangs if the tests of its own room do not end.
    """
    path = copy / mutant.path.relative_to(ROOT)
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    line = lines[mutant.line - 1]
    lines[mutant.line - 1] = line[: mutant.begin] + mutant.text.encode() + line[mutant.end :]
    path.write_bytes(b"".join(lines))
    begun, said = time.monotonic(), "hangs"
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not slow"]
    environment = os.environ | {"PYTHONPATH": str(copy)}
    try:
        for folder in tests_of(mutant.room):
            left = max(SECONDS - (time.monotonic() - begun), 1)
            done = subprocess.run(
                [*command, folder], cwd=copy, env=environment, capture_output=True, timeout=left, check=False
            )
            if done.returncode:
                return "caught", time.monotonic() - begun
            said = "survived"
    except subprocess.TimeoutExpired:
        pass
    finally:
        path.write_bytes(whole)
    return said, time.monotonic() - begun


def report(copies: "queue.SimpleQueue[Path]", mutant: Mutant) -> str:
    """Run a mutant, print a line about it, and return what its tests say."""
    copy = copies.get()
    said, seconds = run(copy, mutant)
    copies.put(copy)
    old = mutant.path.read_text().splitlines()[mutant.line - 1].strip()
    place = f"{mutant.path.relative_to(ROOT)}:{mutant.line}:{mutant.begin}"
    print(f"{said:9} {seconds:4.0f} s  {place} -> {mutant.text}    {old}", flush=True)
    return said


def main() -> int:
    """Draw and run mutants; the status is 1 where more than a tenth survive."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="draws others")
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="run at once")
    given = parser.parse_args()
    copies: queue.SimpleQueue[Path] = queue.SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="draftstore-mutants-") as folder:
        for number in range(given.jobs):
            ignored = shutil.ignore_patterns(".git", ".venv*", "data", "build", "dist")
            copies.put(Path(shutil.copytree(ROOT, Path(folder) / str(number), ignore=ignored)))
        with ThreadPoolExecutor(given.jobs) as threads:
            said = list(threads.map(partial(report, copies), drawn(given.seed, given.count)))
    survivors = said.count("survived")
    print(f"{given.count - survivors} of {given.count} caught, {said.count('hangs')} of them by not ending")
    return int(survivors > given.count / 10)


if __name__ == "__main__":
    sys.exit(main())
