"""The demo, as users see it: real vLLM, every answer compared with an engine that loaded the version's checkpoint itself."""

from __future__ import annotations

import pytest
from rich.console import Console

from e2e.demo import VERSIONS, show
from e2e.fleet import Fleet
from e2e.installation import Installation
from e2e.kubectl import KubectlError

pytestmark = [pytest.mark.story, pytest.mark.engine]


def test_make_demo(installation: Installation) -> None:
    """Five versions into two vLLM generators, two joiners from peers, one killed and back: the demo itself raises when something differs."""

    def remove(fleet: Fleet) -> None:
        try:
            fleet.remove()
        except KubectlError as error:
            print(f"namespace {fleet.namespace} is still there: {error}")

    seen = show(Console(width=160), installation, after=remove)
    assert len(seen) == VERSIONS
    assert [len(version.answers) for version in seen.values()] == [2, 2, 2, 2, 5]
