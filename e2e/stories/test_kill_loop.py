"""Whatever is killed, and whenever: the fleet comes to the newest version, whole, by itself. `make soak` runs it; REFIT_SOAK is the seed."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable

import pytest

from e2e.fleet import ANY_PHASE, START_SECONDS, TRAINER, Fleet
from e2e.installation import NAMESPACE
from e2e.kubectl import eventually

pytestmark = [pytest.mark.story, pytest.mark.soak]
ROUNDS, FEWEST, LIMIT_SECONDS = 16, 8, 1800.0
GENERATORS = 2


def kill_generator(fleet: Fleet, chance: random.Random) -> None:
    fleet.kill(chance.choice(fleet.generators()))


def kill_operator(fleet: Fleet, _: random.Random) -> None:
    fleet.kubectl("delete", "pod", "-n", NAMESPACE, "-l", "app.kubernetes.io/component=operator", "--grace-period=0", "--force", "--wait=false")


def kill_trainer_rank(fleet: Fleet, chance: random.Random) -> None:
    """torchrun ends with it; the container comes back as another run, which publishes as many versions as were allowed."""
    before = life(fleet)
    fleet.signal_trainer_rank(chance.choice((0, 1)), "KILL")
    eventually("the trainer's container is another one", lambda: life(fleet) != before and fleet.is_running(TRAINER), START_SECONDS)


def life(fleet: Fleet) -> tuple[str, int]:
    """Which pod, and which container of it."""
    pod = fleet.kubectl.get("pod", TRAINER, fleet.namespace) or {}
    states = pod.get("status", {}).get("containerStatuses", [])
    return pod.get("metadata", {}).get("uid", ""), sum(state["restartCount"] for state in states)


KILLS: tuple[Callable[[Fleet, random.Random], None], ...] = (kill_generator, kill_generator, kill_operator, kill_trainer_rank)


def settled(fleet: Fleet, above: int) -> tuple[int, str]:
    """The newest version and its checksum, once nothing is being published and all generators serve it, all with that checksum."""

    def newest() -> int:
        """0 while some generator does not serve it."""
        phases = {item["spec"]["version"]: item.get("status", {}).get("phase", "Publishing") for item in fleet.versions()}
        number = max((number for number, phase in phases.items() if phase == "Ready"), default=0)
        serving = fleet.serving()
        whole = "Publishing" not in phases.values() and len(serving) == GENERATORS and set(serving.values()) == {number}
        return number if whole else 0

    def there() -> tuple[int, str] | None:
        number = newest()
        if number <= above:
            return None
        sums = set(fleet.checksums().values())
        return (number, sums.pop()) if len(sums) == 1 and newest() == number else None  # else another version came meanwhile

    found: tuple[int, str] = eventually(f"{GENERATORS} generators serve the newest version, one after {above}, with one checksum", there, START_SECONDS)
    return found


def test_kills_at_random_moments_leave_one_version_everywhere(fleet: Fleet) -> None:
    """And numbers only grow."""
    seed = int(os.environ.get("REFIT_SOAK") or 1)
    chance, end = random.Random(seed), time.monotonic() + LIMIT_SECONDS
    fleet.until_whole(GENERATORS)
    served: list[int] = []
    order = list(KILLS)
    while len(served) < ROUNDS and time.monotonic() < end:
        if len(served) % len(KILLS) == 0:
            order = chance.sample(KILLS, len(KILLS))
        kill = order[len(served) % len(KILLS)]
        before = fleet.newest(ANY_PHASE) or 0
        fleet.allow_one_more()
        time.sleep(chance.uniform(0.0, 3.0))  # from before the first byte to after the commit
        print(f"seed {seed}, round {len(served) + 1}: {kill.__name__} after version {before}", flush=True)
        kill(fleet, chance)
        number, checksum = settled(fleet, before)
        print(f"version {number}: {checksum}", flush=True)
        served.append(number)
    assert len(served) >= FEWEST, f"{len(served)} rounds in {LIMIT_SECONDS:.0f} s"
    assert served == sorted(set(served))
