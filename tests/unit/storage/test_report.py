"""The report of a reading."""

from draftstore.storage.report import ReadReport, RecordProblem


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
