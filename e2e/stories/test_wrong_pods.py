"""Pods that cannot do their part: the error has a name, says what to do, and is where the user looks; nothing is ever installed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from e2e.fleet import GROUP, Fleet
from e2e.groups import Object, refit_group
from e2e.installation import Installation
from e2e.kubectl import eventually

pytestmark = pytest.mark.story
WITHOUT_NIXL = "import runpy, sys; sys.modules['nixl'] = None; runpy.run_module('e2e.workloads.custom_engine', run_name='__main__')"
PORT_IN_USE = (
    "import runpy, socket; s = socket.create_server(('0.0.0.0', 7451)); runpy.run_module('e2e.workloads.custom_engine', run_name='__main__', alter_sys=True)"
)


@pytest.fixture
def alone(installation: Installation) -> Iterator[Fleet]:
    Fleet(installation, "stories-wrong", installation.pods).remove()
    fleet = Fleet.create(installation, "stories-wrong")
    yield fleet
    fleet.remove()


def group(fleet: Fleet, scale: str = "1", **container: Any) -> Object:
    """A good trainer, and an engine whose container is changed."""
    engine = fleet.pods_of.custom_engine(ENGINE_SCALE=scale)
    engine["spec"]["containers"][0].update(container)
    return refit_group(GROUP, fleet.namespace, fleet.pods_of.module_trainer(10), engine)


def until_told(fleet: Fleet, said: str) -> Object:
    """The first condition of the group that has the words, as `kubectl describe` shows it."""

    def there() -> Object | None:
        conditions: list[Object] = fleet.status().get("conditions", [])
        return next((found for found in conditions if said in found["message"]), None)

    found: Object = eventually(f"a condition says {said!r}", there, 120)
    return found


@pytest.mark.parametrize(
    ("container", "said"),
    [
        ({"command": ["python3", "-c", WITHOUT_NIXL]}, "SpecError: NIXL is not installed"),
        ({"command": ["python3", "-c", PORT_IN_USE]}, "7451"),
        ({"resources": {"limits": {"memory": "600Mi"}}, "scale": "18"}, "SpecError: the arena needs"),
    ],
    ids=["no NIXL", "port in use", "no space for the arena"],
)
def test_an_engine_that_cannot_start_says_why_in_the_status_of_its_group(alone: Fleet, container: Object, said: str) -> None:
    alone.kubectl.apply(group(alone, **container))
    assert "exit code 1" in until_told(alone, said)["message"]
    assert alone.condition("Ready")["status"] == "False"


def test_an_engine_of_another_model_is_refused_before_anything_moves(alone: Fleet) -> None:
    alone.kubectl.apply(group(alone, scale="2"))
    alone.allow(1)
    assert "ShapeMismatch" in until_told(alone, "do not agree")["message"]
    assert set(alone.serving().values()) == {0}
    assert [item["status"]["phase"] for item in alone.versions() if item.get("status", {}).get("phase") == "Ready"] == []
