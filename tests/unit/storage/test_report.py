"""The report of a reading."""

from draftstore.storage.report import LINKS, ReadReport, RecordProblem, passed_over_text


def problem(number: int, *, truncated: bool = False) -> RecordProblem:
    return RecordProblem(f"c.jsonl:line {number}", "not JSON", truncated)


def test_only_the_first_problems_are_kept() -> None:
    report = ReadReport(documents=1, empty_documents=2)
    for number in range(15):
        report.add_problem(problem(number, truncated=number == 3))
    whole = ReadReport(documents=3, truncated=1)
    whole.add(report)
    whole.add(report)
    assert (whole.documents, whole.bad_records, whole.empty_documents, whole.truncated) == (5, 30, 4, 3)
    assert whole.problems == [problem(n % 15, truncated=n == 3 or n == 18) for n in range(20)]
    for number in range(50):
        report.add_problem(problem(number))
    assert (report.bad_records, len(report.problems), report.problems[19]) == (65, 20, problem(4))


def test_a_manifest_keeps_the_report() -> None:
    report = ReadReport(3, 2, 1, [problem(1)], ["a.jsonl"], {".parquet": 1}, 1)
    again = ReadReport.of_facts(3, {"fingerprint": "f", **report.facts()})
    assert again == ReadReport(3, 2, 1, [], ["a.jsonl"], {".parquet": 1}, 1)


def test_the_reasons_why_there_is_no_text() -> None:
    assert ReadReport().absence() == ""
    one = ReadReport(bad_records=1, empty_documents=1, problems=[problem(7)])
    assert one.absence() == "1 empty document; 1 bad record, c.jsonl:line 7: not JSON"
    two = ReadReport(bad_records=2, problems=[problem(7)], passed_over={".jsonl": 1})
    assert two.absence() == (
        "2 bad records, the first c.jsonl:line 7: not JSON; "
        "1 data file in folders was skipped (.jsonl): name it, or give the glob '*.jsonl'"
    )


def test_what_was_passed_over_is_told_with_the_remedy() -> None:
    assert passed_over_text({}) == ""
    assert passed_over_text({".jsonl": 2, ".parquet": 3, LINKS: 2}) == (
        "5 data files in folders were skipped (.jsonl, .parquet): name them, or give the glob '*.parquet'; "
        "2 links in folders lead out of them: name the files to read them"
    )
    assert passed_over_text({LINKS: 1}).startswith("1 link in folders leads out of them")
