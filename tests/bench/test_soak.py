"""A soak that failed says so in its figures, whatever pytest called it."""

from __future__ import annotations

from pathlib import Path

from bench.soak import commit, read

REPORT = """<testsuites><testsuite name="pytest" tests="4">
<testcase name="test_a" time="1.5"/><testcase name="test_b" time="2.5"><failure message="no">...</failure></testcase>
<testcase name="test_c" time="0.5"><error message="no">...</error></testcase><testcase name="test_d" time="0.0"><skipped/></testcase>
</testsuite></testsuites>"""


def test_what_became_of_the_tests(tmp_path: Path) -> None:
    (tmp_path / "report.xml").write_text(REPORT)
    found = {each.name: (each.value, each.met) for each in read(tmp_path / "report.xml")}
    assert found == {
        "tests passed": (1, True),
        "tests failed": (2, False),
        "tests skipped": (1, None),
        "duration": (4.5, None),
        "slowest: test_b": (2.5, None),
    }


def test_the_commit_is_known() -> None:
    assert commit() != "unknown"
