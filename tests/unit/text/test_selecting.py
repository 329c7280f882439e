"""Rollouts: prompts with their outputs, and the records for which a condition is true."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftstore.errors import CorpusError
from draftstore.options import OptionsError
from draftstore.storage.report import ReadReport, RecordProblem
from draftstore.stores.rest.build import RestOptions, build_rest
from draftstore.stores.rest.store import RestStore
from draftstore.text.corpus import find_files, read_files
from draftstore.text.digests import identify
from draftstore.text.records import Document
from draftstore.text.selecting import BATCH, RecordOptions, select
from draftstore.text.tokenizer import TextTokenizer
from tests.unit.text.test_corpus import lines, render, write, write_parquet

VERL = "prompt=input,output=output"
TRL = "prompt=prompt,output=completion"
ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]
SAID = [{"role": "assistant", "content": "4"}]


def read(*paths: Path, strict: bool = False, **options: Any) -> tuple[list[Document], ReadReport]:
    report, records = ReadReport(), RecordOptions(**options)
    files = find_files(paths, report=report)
    return list(read_files(files, render=render, report=report, records=records, strict=strict)), report


def either(tmp_path: Path, *records: dict[str, Any]) -> list[Path]:
    """Write records as JSON Lines and as Parquet."""
    columns = {key: [record.get(key) for record in records] for key in records[0]}
    return [write(tmp_path / "r.jsonl", lines(*records)), write_parquet(tmp_path / "r.parquet", columns)]


def test_a_prompt_and_its_output_are_one_text(tmp_path: Path) -> None:
    rollout = {"input": "<user>2+2?<assistant>", "output": "4", "step": 1, "score": 1.0, "id": "a"}
    for path in either(tmp_path, rollout):
        whole = Document.plain("a", "<user>2+2?<assistant>4")
        assert read(path, fields=VERL)[0] == [whole]


@pytest.mark.parametrize(
    ("prompt", "completion", "messages"),
    [
        (ASKED, SAID, [*ASKED, *SAID]),
        (ASKED, "4", [*ASKED, *SAID]),
        ("2+2?", SAID, [ASKED[1], *SAID]),
        ([{"from": "human", "value": "2+2?"}], SAID, [ASKED[1], *SAID]),
    ],
)
def test_messages_are_one_conversation(tmp_path: Path, prompt: Any, completion: Any, messages: Any) -> None:
    for path in either(tmp_path, {"prompt": prompt, "completion": completion, "reward": 0.5}):
        [document] = read(path, fields=TRL)[0]
        assert (document.text, document.identity) == (render(messages), identify(messages))


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"input": "a"}, "has no 'output', only input"),
        ({"input": "a", "output": None}, "'output' is a NoneType, expected text or a list of messages"),
        ({"input": {"a": 1}, "output": "b"}, "'input' is a dict, expected text or a list of messages"),
        ({"input": "a", "output": ["b"]}, r"output[0] is a str, expected an object"),
    ],
)
def test_other_pairs_are_bad_records(tmp_path: Path, record: Any, reason: str) -> None:
    path = write(tmp_path / "r.jsonl", lines(record, {"input": "a", "output": "b"}))
    documents, report = read(path, fields=VERL)
    assert ([document.text for document in documents], report.bad_records) == (["ab"], 1)
    assert report.problems == [RecordProblem(f"{path}:line 1", reason)]


@pytest.mark.parametrize(("fields", "keys"), [(VERL, ("input", "output")), (TRL, ("prompt", "completion"))])
def test_rollouts_read_as_texts_name_the_option_to_add(
    tmp_path: Path, fields: str, keys: tuple[str, str]
) -> None:
    plain, table = either(tmp_path, dict.fromkeys(keys, "a"))
    assert read(plain)[1].problems[0].reason.endswith(f": add --fields {fields}")
    with pytest.raises(
        CorpusError, match=f"has no column 'text', only {', '.join(keys)}: add --fields {fields}"
    ):
        read(table)


VALUES = st.none() | st.integers(-3, 3) | st.sampled_from([0.5, -0.5, math.nan])
RECORDS = st.lists(st.dictionaries(st.sampled_from(["score", "step"]), VALUES), max_size=12)


def known(record: dict[str, Any], key: str) -> Any:
    """Return a number, or None if it is missing, null or NaN."""
    value = record.get(key)
    return None if value is None or math.isnan(value) else value


def over(key: str, bound: float) -> Callable[[dict[str, Any]], bool | None]:
    return lambda record: None if known(record, key) is None else known(record, key) > bound


def both(record: dict[str, Any]) -> bool | None:
    found = {over("score", 0)(record), over("step", 1)(record)}
    return False if False in found else None if None in found else True


CONDITIONS: dict[str, Callable[[dict[str, Any]], bool | None]] = {
    "score > 0": over("score", 0),
    "score > 0 AND step > 1": both,
    "NOT (score > 0)": lambda record: known(record, "score") is not None and not over("score", 0)(record),
    "score IS NULL": lambda record: known(record, "score") is None,
    "step IN (1, 2)": lambda record: known(record, "step") in (1, 2),
}


@pytest.mark.parametrize("where", CONDITIONS)
@given(records=RECORDS)
def test_a_condition_chooses_as_python_would(where: str, records: list[dict[str, Any]]) -> None:
    many = records * (2 * BATCH // max(1, len(records)) + 1)  # several batches
    found = [
        record
        for _, record in select(enumerate(many), where, Path("r"), "line")
        if not isinstance(record, RecordProblem)
    ]
    assert len(found) == len(many)
    for record, chosen in zip(many, found, strict=True):
        assert chosen is (record if CONDITIONS[where](record) is True else None)


def test_records_left_out_are_counted(tmp_path: Path) -> None:
    rollouts = [{"input": "a", "output": str(number), "score": number % 3} for number in range(600)]
    for path in either(tmp_path, *rollouts):
        documents, report = read(path, fields=VERL, where="score > 1")
        assert [document.text for document in documents] == [f"a{number}" for number in range(2, 600, 3)]
        assert (report.documents, report.filtered, report.bad_records) == (200, 400, 0)
        nothing, report = read(path, fields=VERL, where="score > 5")
        assert (nothing, report.filtered, report.unread) == ([], 600, [])


def test_a_key_that_no_record_has_is_reported(tmp_path: Path) -> None:
    plain, table = either(tmp_path, {"text": "a", "score": 1}, {"text": "b", "score": None})
    documents, report = read(plain, where="scor > 0")
    assert (documents, report.filtered) == ([], 2)
    [problem] = report.problems
    assert problem.reason == "no record has scor, only text, score: `where` took it for null"
    with pytest.raises(CorpusError, match="no record has scor"):
        read(plain, where="scor > 0", strict=True)
    with pytest.raises(CorpusError, match=r"has no column 'scor', only text, score: .* \(where\)"):
        read(table, where="scor > 0")
    empty = write(tmp_path / "empty.jsonl", "")
    assert read(empty, where="score > 0")[1].bad_records == 0


def test_keys_that_are_null_in_a_batch_have_the_type_of_the_others(tmp_path: Path) -> None:
    some, none = {"text": "a", "info": {"error": "x"}, "score": 1, "note": "n"}, {"text": "a"}
    bad = b"not JSON\n" * BATCH
    path = write(tmp_path / "r.jsonl", lines(some, *[none] * BATCH) + bad + lines(some, *[none] * BATCH))
    for where in ("score > 0 AND note LIKE 'n%'", "info.error = 'x'"):
        documents, report = read(path, where=where)
        assert (len(documents), report.filtered, report.bad_records) == (2, 2 * BATCH, BATCH)


def test_texts_that_are_always_null_match_nothing(tmp_path: Path) -> None:
    path = write(tmp_path / "r.jsonl", lines({"text": "a", "error": None}, {"text": "b"}))
    for where in ("error LIKE '%x%'", "LENGTH(error) > 1", "error > 1"):
        assert read(path, where=where)[1].filtered == 2


def test_a_value_that_cannot_be_compared_costs_its_record(tmp_path: Path) -> None:
    records = [
        {"text": f"{number}", "score": "high" if number in (3, 5 * BATCH) else number}
        for number in range(5 * BATCH + 1)
    ]
    path = write(tmp_path / "r.jsonl", lines(*records))
    texts, report = read(path, where="score > 1")
    assert [each.text for each in texts] == [str(number) for number in range(2, 5 * BATCH) if number != 3]
    assert (report.filtered, report.bad_records) == (2, 2)
    assert report.problems[0].place.endswith("r.jsonl:line 4")
    assert "cannot be evaluated" in report.problems[0].reason


@pytest.mark.parametrize(
    ("where", "reason"),
    [
        ("text > 1", "cannot compare string with numeric type"),
        ("score", "the condition gives a value"),
        ("score > AVG(score)", "compares records with others"),
        ("score > LAG(score) OVER (ORDER BY score)", "compares records with others"),
    ],
)
def test_what_cannot_be_decided_for_each_record_is_refused(tmp_path: Path, where: str, reason: str) -> None:
    for path in either(tmp_path, *({"text": str(number), "score": number} for number in range(4))):
        with pytest.raises(CorpusError, match=rf"{path}: .*{reason}.* \(where\)$"):
            read(path, where=where)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"where": "score >"}, "where: is not an SQL expression: unable to parse 'score >'"),
        ({"where": "score > 0; x"}, "where: is not an SQL expression"),
        ({"where": "COUNT(*) > 1"}, "where: must name a key of the records"),
        ({"fields": "input,output"}, "fields: must name two keys, as in prompt=input,output=output"),
        ({"fields": "prompt=a"}, "fields: must name two keys"),
    ],
)
def test_invalid_options_are_refused_before_anything_is_read(options: dict[str, str], reason: str) -> None:
    with pytest.raises(OptionsError, match=f"^{reason}"):
        RestOptions(corpus=(Path("absent"),), **options)


@pytest.mark.parametrize(("option", "value"), [("where", "score > 0"), ("fields", VERL)])
def test_a_text_file_has_no_keys(tmp_path: Path, option: str, value: str) -> None:
    with pytest.raises(CorpusError, match=rf"a\.txt has no records with keys: .*\({option}\)"):
        read(write(tmp_path / "a.txt"), **dict[str, Any]({option: value}))


def test_rollouts_become_a_store_that_drafts_from_them(
    tmp_path: Path, small_tokenizer: TextTokenizer
) -> None:
    folder, files = tmp_path / "rollouts", ("*.jsonl", "*.parquet")
    for step in (1, 2):
        scored = [{"input": "2+2?", "output": f"{word}!", "step": step, "score": score}
                  for word, score in ((f"right{step}", 1.0), (f"wrong{step}", -1.0))]  # fmt: skip
        write(folder / f"{step}.jsonl", lines(*scored))
    write_parquet(
        folder / "completions.parquet", {"input": [ASKED], "output": [SAID], "score": [0.5], "step": [3]}
    )
    options = RestOptions(corpus=(folder,), name="r", glob=files, fields=VERL, where="score > 0")
    built = build_rest(options, small_tokenizer, tmp_path / "store", workers=1)
    assert (built.report.documents, built.report.filtered) == (3, 2)
    assert built.manifest.corpus["filtered"] == 2
    store = RestStore.open(built.path)
    tree = store.drafter().session(small_tokenizer.encode("2+2?", bos=True)).propose(budget=64)
    drafted = {small_tokenizer.decode(tree.tokens[tree.path(node)]) for node in range(len(tree))}
    store.close()
    assert {"right1!", "right2!"} <= drafted
    assert not any(text.startswith("w") for text in drafted)
    assert build_rest(options, small_tokenizer, tmp_path / "store", workers=1).reused
    other = options.changed(where="score > 0.7")
    assert other.texts().inputs != options.texts().inputs != options.changed(where=None).texts().inputs
    everything = RestOptions(corpus=(folder,), name="r", glob=files)
    assert everything.texts().inputs != everything.changed(fields=VERL).texts().inputs
