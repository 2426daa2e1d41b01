"""What stories share: a cluster with Refit installed, and one running fleet, since starting a trainer and engines takes most of a story's time.

Each story leaves the fleet whole: serving, not paused, its trainer answering. When a story fails, what the cluster says is printed.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from e2e.fleet import Fleet
from e2e.installation import Installation, install
from e2e.kubectl import KubectlError

NAMESPACE = "stories"
SHORT = {"leaseSeconds": 15, "drainSeconds": 5, "publishDeadlineSeconds": 50}  # the least that the schema allows


@pytest.fixture(scope="session")
def installation() -> Installation:
    return install()


@pytest.fixture(scope="session")
def running(installation: Installation) -> Iterator[Fleet]:
    Fleet(installation, NAMESPACE, installation.pods).remove()
    fleet = Fleet.create(installation, NAMESPACE)
    fleet.apply(replicas=1, versions=SHORT)
    yield fleet
    try:
        fleet.remove()
    except KubectlError as error:
        print(f"namespace {fleet.namespace} is still there: {error}")


@pytest.fixture
def fleet(running: Fleet, request: pytest.FixtureRequest) -> Iterator[Fleet]:
    """The shared fleet, of one generator that serves the newest version."""
    failed = request.session.testsfailed
    running.until_whole(replicas=1)
    yield running
    if request.session.testsfailed > failed:
        print(running.describe())
