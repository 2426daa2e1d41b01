"""Long lists, many seeds, kill loops: `python -m bench soak`, which is `make soak`. Prints a table and writes bench/results/soak.json.

Every property with many more examples, every seeded case, and the stories marked `soak`, on the cluster. REFIT_SOAK=SEED chooses other kills.
What failed is printed by pytest as it happens, kept as numbers here, and makes the exit code 1.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

from bench.figures import Metric, machine, metric, record

ROOT = Path(__file__).parents[1]
SELECTED = "soak or hypothesis"
MOST_SECONDS = 3 * 3600
SEED = "1"


def read(report: Path) -> list[Metric]:
    """Of a JUnit report: one case for each test, with what became of it as its child."""
    counts: Counter[str] = Counter()
    slowest, seconds = ("none", 0.0), 0.0
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        took = float(case.get("time", "0"))
        slowest, seconds = max(slowest, (f"{case.get('name')}", took), key=lambda each: each[1]), seconds + took
        counts[next((child.tag for child in case if child.tag in ("failure", "error", "skipped")), "passed")] += 1
    return [
        metric("tests passed", counts["passed"], least=1),
        metric("tests failed", counts["failure"] + counts["error"], most=0),
        metric("tests skipped", counts["skipped"]),
        metric("duration", seconds, "s"),
        metric(f"slowest: {slowest[0]}", slowest[1], "s"),
    ]


def commit() -> str:
    """With a plus sign when files differ from it."""
    said = subprocess.run(["git", "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"], cwd=ROOT, capture_output=True, text=True, check=False)
    return said.stdout.strip() or "unknown"


def main() -> None:
    environment = {**os.environ, "REFIT_SOAK": os.environ.get("REFIT_SOAK") or SEED}
    tested = commit()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "tests", "e2e/stories", "-m", SELECTED, f"--junitxml={report}"]
        ended = subprocess.run(command, cwd=ROOT, env=environment, timeout=MOST_SECONDS, check=False).returncode
        if not report.exists():
            sys.exit(f"pytest ended with exit code {ended} and no report")
        metrics = read(report)
    record("soak", metrics, machine(), ("hypothesis", "pytest"), commit=tested, seed=environment["REFIT_SOAK"])
    if ended != 0:
        sys.exit(1)
