"""The table of clients, made from what the suites report."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.clients.run import SUITES, page, pytest_cases, reason_of

REPORT = """<testsuites><testsuite>
<testcase classname="tests.test_a" name="test_one" />
<testcase classname="tests.test_a" name="test_two"><failure message="400 == 200&#10;more">trace</failure></testcase>
<testcase classname="tests.test_a" name="test_three"><skipped message="no vector stores" /></testcase>
</testsuite></testsuites>"""


def test_a_junit_report_gives_each_case_its_outcome_and_first_line(tmp_path: Path) -> None:
    (tmp_path / "report.xml").write_text(REPORT)
    assert pytest_cases(tmp_path / "report.xml") == [
        {"case": "test_a::test_one", "outcome": "passed"},
        {"case": "test_a::test_two", "outcome": "failed", "reason": "400 == 200"},
        {"case": "test_a::test_three", "outcome": "skipped", "reason": "no vector stores"},
    ]


@pytest.mark.parametrize(
    ("case", "message", "reason"),
    [
        ("m::test_x", "400 - input_image is not read", "needs a model that sees; refused by name"),
        ("test_web_search::test_x", "400 - resp_" + "0" * 32, "400 - …"),  # the module's name says nothing
    ],
)
def test_a_known_message_is_put_in_words_and_another_loses_its_ids(case: str, message: str, reason: str) -> None:
    assert reason_of({"case": case, "outcome": "failed", "reason": message}) == reason


def test_the_page_names_each_case_that_did_not_pass() -> None:
    cases = [
        {"case": "one", "outcome": "passed"},
        {"case": "m::two", "outcome": "failed", "reason": "it broke"},
        {"case": "m::three", "outcome": "failed", "reason": "it broke"},
    ]
    result = {"name": SUITES[0].name, "date": "2026-01-02T03:04:05", "versions": "zod 3", "cases": cases}
    result |= {"passed": 1, "failed": 2, "skipped": 0}
    text = page([result])
    assert "| zod 3 | 2026-01-02 | 1 of 3 | 2 | 0 |" in text
    assert "- failed, 2: it broke: `two`, `three`" in text
