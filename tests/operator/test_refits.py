"""Versions reach generators: the real operator and the real catalog, on a real API server, with scripted trainers and generators."""

from __future__ import annotations

import asyncio

import pytest
from refit_api import wire
from refit_api.errors import PeerError
from refit_api.wire import Order, RankPhase, Role
from refit_operator import telemetry

from e2e.cluster.apiserver import ApiServer
from tests.operator.conftest import SERVICE_ACCOUNT
from tests.operator.stage import APPS, CORE, Body, Stage, condition, refit_group

STAGE, COMMIT = Order.STAGE, Order.COMMIT
GENERATORS = refit_group()["spec"]["generators"]


def record(number: int) -> str:
    return f"demo-v{number:09d}"


def synced(pod: Body) -> str:
    return next((c["status"] for c in pod["status"].get("conditions", ()) if c["type"] == "refit.dev/synced"), "")


async def test_the_first_version_is_staged_committed_and_shown(stage: Stage) -> None:
    """From a publish to Ready: records, orders, the readiness gate, conditions, counters."""
    await stage.create(refit_group())
    trainer, generator = await stage.trainer(), await stage.generator("demo-generator-a")
    number = await trainer.publish(step=0)
    group = await stage.until("refitgroups", "demo", lambda g: condition(g, "WeightsCurrent")[0] == "True")
    assert [(order.target, order.order) for order in generator.orders] == [(number, STAGE), (number, COMMIT)]
    await stage.until("pods", "demo-generator-a", lambda p: synced(p) == "True", CORE)
    version = await stage.until("weightversions", record(number), lambda v: condition(v, "Converged")[0] == "True")
    assert version["status"]["phase"] == "Ready"
    group = await stage.until("refitgroups", "demo", lambda g: condition(g, "Ready")[0] == "True")
    status = group["status"]
    assert (status["targetVersion"], status["currentVersion"], status["generators"]["atTarget"]) == (number, number, 1)
    assert status["lastRefit"]["wireSeconds"] == 0.5


async def test_versions_follow_each_other_and_old_ones_go(stage: Stage) -> None:
    """Ten in a row: everyone gets the newest, `retain` records stay, nothing else is left."""
    await stage.create(refit_group(versions={"retain": 2}))
    trainer, generator = await stage.trainer(), await stage.generator("demo-generator-a")
    for step in range(10):
        number = await trainer.publish(step)
        await stage.until("refitgroups", "demo", lambda g, n=number: g["status"].get("currentVersion") == n)  # type: ignore[misc]
        await trainer.close(number)
    assert generator.said is not None
    assert generator.said.serving == number
    for _ in range(100):
        left = [v["spec"]["version"] for v in await stage.list("weightversions")]
        if len(left) == 2:
            break
        await asyncio.sleep(0.1)
    assert left == [number - 1, number]


async def test_new_generators_join_from_a_peer(stage: Stage) -> None:
    """The trainers are not read again, and nobody who serves gets an order."""
    await stage.create(refit_group(generators={**GENERATORS, "replicas": 3}))
    trainer, first = await stage.trainer(), await stage.generator("demo-generator-a")
    number = await trainer.publish(step=0)
    await stage.until("refitgroups", "demo", lambda g: g["status"].get("currentVersion") == number)
    served = len(first.orders)
    joined = [await stage.generator(f"demo-generator-{name}") for name in "bc"]
    await stage.until("refitgroups", "demo", lambda g: g["status"]["generators"]["atTarget"] == 3)
    assert [one.said.read_from(Role.TRAINER) for one in joined if one.said] == [0, 0]
    assert len(first.orders) == served


async def test_a_generator_that_cannot_stage_is_named_and_the_others_go_on(stage: Stage) -> None:
    """The old version keeps serving; status says which pod, why, and the next version is tried."""
    await stage.create(refit_group(generators={**GENERATORS, "replicas": 2}))
    trainer = await stage.trainer()
    good, bad = await stage.generator("demo-generator-a"), await stage.generator("demo-generator-b")
    first = await trainer.publish(step=0)
    await stage.until("refitgroups", "demo", lambda g: condition(g, "WeightsCurrent")[0] == "True")
    bad.refuse = wire.ErrorDetail("DigestMismatch", "block 7 is not what was published")
    second = await trainer.publish(step=1)
    group = await stage.until("refitgroups", "demo", lambda g: condition(g, "Degraded")[0] == "True")
    assert group["status"]["stragglers"] == [{"pod": "demo-generator-b", "version": first, "reason": "DigestMismatch"}]
    assert condition(group, "Ready")[0] == "True"
    assert good.said is not None
    await stage.until("refitgroups", "demo", lambda g: g["status"].get("currentVersion") == second)
    bad.refuse = None
    third = await trainer.publish(step=2)
    await stage.until("refitgroups", "demo", lambda g: condition(g, "WeightsCurrent")[0] == "True" and g["status"]["targetVersion"] == third)


async def test_a_version_that_cannot_be_installed_is_taken_back_everywhere(stage: Stage) -> None:
    """onFailure Rollback: one fails, the other goes back from it, the record says why, and the next version is taken by both."""
    await stage.create(refit_group(generators={**GENERATORS, "replicas": 2}, rollout={"onFailure": "Rollback"}))
    trainer = await stage.trainer()
    good, bad = await stage.generator("demo-generator-a"), await stage.generator("demo-generator-b")
    first = await trainer.publish(step=0)
    await stage.until("refitgroups", "demo", lambda g: condition(g, "WeightsCurrent")[0] == "True")
    bad.refuse = wire.ErrorDetail("DigestMismatch", "block 7 is not what was published")
    second = await trainer.publish(step=1)
    version = await stage.until("weightversions", record(second), lambda v: condition(v, "Rejected") == ("True", "RolledBack"))
    assert "demo-generator-b: DigestMismatch: block 7" in next(c["message"] for c in version["status"]["conditions"] if c["type"] == "Rejected")
    bad.refuse = None
    group = await stage.until("refitgroups", "demo", lambda g: g["status"]["targetVersion"] == first and condition(g, "WeightsCurrent")[0] == "True")
    assert condition(group, "Degraded")[0] == "False"
    assert {actor.said.serving for actor in (good, bad) if actor.said} == {first}
    third = await trainer.publish(step=2)
    await stage.until("refitgroups", "demo", lambda g: g["status"].get("currentVersion") == third and condition(g, "WeightsCurrent")[0] == "True")


async def test_a_pin_to_the_version_that_is_kept_needs_no_pull(stage: Stage) -> None:
    """keepPrevious: what a generator keeps beside what it serves is held, counted and committed from where it is."""
    await stage.create(refit_group(generators={**GENERATORS, "engine": {"kind": "Custom", "keepPrevious": True}}))
    trainer, generator = await stage.trainer(), await stage.generator("demo-generator-a")
    generator.keeps = True
    first = await trainer.publish(step=0)
    await stage.until("refitgroups", "demo", lambda g: g["status"].get("currentVersion") == first)
    await trainer.publish(step=1)
    await stage.until("refitgroups", "demo", lambda g: g["status"].get("currentVersion") == first + 1)
    version = await stage.until("weightversions", record(first), lambda v: v["status"]["holders"] == {"trainers": 0, "generators": 1, "total": 1})
    assert condition(version, "Available")[0] == "True"
    ordered = len(generator.orders)
    await stage.patch("refitgroups", "demo", {"spec": {"rollout": {"policy": "Pinned", "pinnedVersion": first}}})
    await stage.until("refitgroups", "demo", lambda g: g["status"].get("currentVersion") == first)
    assert [(order.target, order.order) for order in generator.orders[ordered:]] == [(first, COMMIT)]


async def test_a_framework_drives_and_the_operator_tells(stage: Stage) -> None:
    """Manual: pods are made, nobody gets an order; what each rank says of itself gives readiness, counters, conditions and holders."""
    await stage.create(refit_group(rollout={"policy": "Manual"}))
    trainer, generator = await stage.trainer(), await stage.generator("demo-generator-a")
    number = await trainer.publish(step=0)
    await stage.until("refitgroups", "demo", lambda g: condition(g, "WeightsCurrent") == ("False", "FrameworkDriven"))
    await stage.until("pods", "demo-generator-a", lambda p: synced(p) == "False", CORE)
    await generator.stage(number)
    await generator.commit(number)
    group = await stage.until("refitgroups", "demo", lambda g: condition(g, "Ready")[0] == "True" and condition(g, "WeightsCurrent")[0] == "True")
    assert (group["status"]["currentVersion"], group["status"]["generators"]["atTarget"]) == (number, 1)
    await stage.until("pods", "demo-generator-a", lambda p: synced(p) == "True", CORE)
    await stage.until("weightversions", record(number), lambda v: v["status"]["holders"]["generators"] == 1)
    await generator.say(fenced=True, phase=RankPhase.FENCED, serving=0, error=wire.ErrorDetail("InstallError", "the last copy"))
    group = await stage.until("refitgroups", "demo", lambda g: g["status"]["generators"]["fenced"] == 1)
    assert condition(group, "Degraded") == ("True", "GeneratorsFenced")
    await stage.until("pods", "demo-generator-a", lambda p: synced(p) == "False", CORE)
    assert telemetry.GENERATORS.labels(stage.namespace, "demo", "fenced")._value.get() == 1
    assert generator.orders == []


async def test_pin_and_back(stage: Stage) -> None:
    """A rollback by spec reaches a version that only a peer still holds; a pin that nobody holds says what can be pinned."""
    await stage.create(refit_group(generators={**GENERATORS, "replicas": 2}))
    trainer, one, two = await stage.trainer(), await stage.generator("demo-generator-a"), await stage.generator("demo-generator-b")
    first = await trainer.publish(step=0)
    await stage.until("refitgroups", "demo", lambda g: condition(g, "WeightsCurrent")[0] == "True")
    await stage.patch("refitgroups", "demo", {"spec": {"rollout": {"policy": "Pinned", "pinnedVersion": first}}})
    await stage.until("refitgroups", "demo", lambda g: g["status"]["observedGeneration"] == 2)
    await trainer.publish(step=1)
    await asyncio.sleep(1.0)
    assert {actor.said.serving for actor in (one, two) if actor.said} == {first}
    await stage.patch("refitgroups", "demo", {"spec": {"rollout": {"pinnedVersion": 99}}})
    group = await stage.until("refitgroups", "demo", lambda g: condition(g, "Stalled") == ("True", "VersionNotFound"))
    assert f"versions with holders: {first}, {first + 1}" in next(c["message"] for c in group["status"]["conditions"] if c["type"] == "Stalled")
    await stage.patch("refitgroups", "demo", {"spec": {"rollout": {"policy": "Latest"}}})
    await stage.until("refitgroups", "demo", lambda g: g["status"].get("currentVersion") == first + 1 and condition(g, "Stalled")[0] == "False")


async def test_a_new_operator_continues_where_the_old_one_was(stage: Stage) -> None:
    """Restarted in mid-rollout: no version is lost, none is given twice, nobody who serves is bothered; numbers go on above the ceiling."""
    await stage.create(refit_group(generators={**GENERATORS, "replicas": 2}, versions={"leaseSeconds": 15, "drainSeconds": 5}))
    trainer, one, two = await stage.trainer(), await stage.generator("demo-generator-a"), await stage.generator("demo-generator-b")
    first = await trainer.publish(step=0)
    before = await stage.until("refitgroups", "demo", lambda g: condition(g, "WeightsCurrent")[0] == "True")
    await stage.restart()
    group = await stage.until("refitgroups", "demo", lambda g: g["status"]["catalogEpoch"] > before["status"]["catalogEpoch"])
    assert condition(group, "Ready")[0] == "True"
    second = await trainer.publish(step=1)
    assert second > before["status"]["versionCeiling"] >= first
    await stage.until("refitgroups", "demo", lambda g: g["status"].get("currentVersion") == second)
    assert [(o.target, o.order) for o in (*one.orders, *two.orders) if o.target == first] == [(first, STAGE), (first, COMMIT)] * 2


async def test_a_version_without_all_its_shards_is_never_installed(stage: Stage) -> None:
    """It fails at its deadline, says which slot is missing, and the next one goes through."""
    await stage.create(refit_group(versions={"publishDeadlineSeconds": 45, "leaseSeconds": 15, "drainSeconds": 0}))
    trainer, generator = await stage.trainer(), await stage.generator("demo-generator-a")
    half = await trainer.create(step=0)
    await stage.until("weightversions", record(half.number), lambda v: condition(v, "Ready") == ("False", "SlotsMissing"))
    await trainer.call("AbortVersion", wire.EndVersion(stage.key(), half.number, "the trainer gave up"))
    await stage.until("weightversions", record(half.number), lambda v: v["status"]["phase"] == "Failed")
    number = await trainer.publish(step=1)
    await stage.until("refitgroups", "demo", lambda g: g["status"].get("currentVersion") == number)
    assert half.number not in [order.target for order in generator.orders]


async def test_deleting_a_version_retires_it_and_the_finalizer_goes(stage: Stage) -> None:
    """Also the one in use: who serves it goes on, Latest never selects it again."""
    await stage.create(refit_group())
    trainer, generator = await stage.trainer(), await stage.generator("demo-generator-a")
    number = await trainer.publish(step=0)
    version = await stage.until("weightversions", record(number), lambda v: condition(v, "Converged")[0] == "True")
    await stage.cluster.delete("WeightVersion", stage.namespace, record(number), version["metadata"]["uid"])
    for _ in range(100):
        if not await stage.list("weightversions"):
            break
        await asyncio.sleep(0.1)
    assert await stage.list("weightversions") == []
    assert generator.said is not None
    assert generator.said.serving == number
    assert condition(await stage.get("refitgroups", "demo"), "Ready")[0] == "True"


async def test_deleting_the_group_lets_everything_go(stage: Stage) -> None:
    """The garbage collector deletes what the group owns; our finalizers must not hold it up, and the catalog forgets."""
    made = await stage.create(refit_group())
    trainer, _ = await stage.trainer(), await stage.generator("demo-generator-a")
    number = await trainer.publish(step=0)
    version = await stage.until("weightversions", record(number), lambda v: condition(v, "Converged")[0] == "True")
    await stage.cluster.delete("RefitGroup", stage.namespace, "demo", made["metadata"]["uid"])
    for pod in await stage.list("pods", CORE):
        await stage.cluster.delete("Pod", stage.namespace, pod["metadata"]["name"], pod["metadata"]["uid"])
    await stage.cluster.delete("WeightVersion", stage.namespace, record(number), version["metadata"]["uid"])
    for _ in range(150):
        if not await stage.list("weightversions"):
            break
        await asyncio.sleep(0.1)
    assert await stage.list("weightversions") == []
    await asyncio.sleep(0.5)
    with pytest.raises(PeerError):
        await trainer.call("ListVersions", wire.ListVersions(stage.key()))


async def test_a_fenced_generator_gets_no_requests_until_it_serves_again(stage: Stage) -> None:
    """The readiness gate follows the fence; the same version is installed again."""
    await stage.create(refit_group())
    trainer, generator = await stage.trainer(), await stage.generator("demo-generator-a")
    number = await trainer.publish(step=0)
    await stage.until("pods", "demo-generator-a", lambda p: synced(p) == "True", CORE)
    await generator.say(fenced=True, phase=RankPhase.FENCED, serving=0)
    await stage.until("pods", "demo-generator-a", lambda p: synced(p) == "True" and len(generator.orders) > 2, CORE)
    assert generator.orders[-1].target == number


async def test_a_version_costs_few_writes(stage: Stage, api_server: ApiServer) -> None:
    """O(1) for the whole fleet, below two a second for a version every ten seconds: counted by the API server's own audit log."""
    await stage.create(refit_group(generators={**GENERATORS, "replicas": 4}))
    trainer = await stage.trainer()
    for name in "abcd":
        await stage.generator(f"demo-generator-{name}")
    await trainer.publish(step=0)
    await stage.until("refitgroups", "demo", lambda g: condition(g, "Ready")[0] == "True" and condition(g, "WeightsCurrent")[0] == "True")
    await asyncio.sleep(6.0)
    before, steps = _writes(api_server, stage), 3
    for step in range(1, 1 + steps):
        number = await trainer.publish(step)
        await stage.until("refitgroups", "demo", lambda g, n=number: g["status"].get("currentVersion") == n)  # type: ignore[misc]
        await asyncio.sleep(6.0)
    assert (_writes(api_server, stage) - before) / steps < 20
    assert (await stage.get("deployments", "demo-generator", APPS))["metadata"]["generation"] == 1


def _writes(server: ApiServer, stage: Stage) -> int:
    """Creations, patches and deletions of the two kinds by the operator."""
    ours = [w for w in server.writes() if w.user == SERVICE_ACCOUNT and w.namespace == stage.namespace]
    return sum(w.resource.partition("/")[0] in ("refitgroups", "weightversions") for w in ours)
