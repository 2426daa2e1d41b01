"""What every story has: a cluster with Refit installed, a namespace of its own, and a look at what is left behind."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

import pytest

from e2e.fleet import Fleet
from e2e.installation import Installation, install
from e2e.kubectl import KubectlError

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def installation() -> Installation:
    return install()


@pytest.fixture
def fleet(installation: Installation, request: pytest.FixtureRequest) -> Iterator[Fleet]:
    """A namespace for one story. When the story failed, what it left is printed before it is deleted."""
    words = re.sub(r"[^a-z0-9]+", "-", request.node.name.lower()).strip("-")[:30].strip("-")
    fleet = Fleet.create(installation, f"s{next(_numbers)}-{words}")
    failed = request.session.testsfailed
    yield fleet
    if request.session.testsfailed > failed:
        print(fleet.describe())
    try:
        fleet.remove()
    except KubectlError as error:
        print(f"namespace {fleet.namespace} is still there: {error}")
