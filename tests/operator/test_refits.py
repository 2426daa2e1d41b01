"""Versions reach generators: the real operator and the real catalog, on a real API server, with scripted trainers and generators."""

from __future__ import annotations

from refit_api.wire import Order

from tests.operator.stage import CORE, Stage, condition, refit_group


async def test_the_first_version_is_staged_committed_and_shown(stage: Stage) -> None:
    """From a publish to Ready: records, orders, the readiness gate, conditions, counters."""
    await stage.create(refit_group())
    trainer, generator = await stage.trainer(), await stage.generator("demo-generator-a")
    number = await trainer.publish(step=0)
    group = await stage.until("refitgroups", "demo", lambda g: condition(g, "Ready")[0] == "True")
    assert [(order.target, order.order) for order in generator.orders] == [(number, Order.STAGE), (number, Order.COMMIT)]
    pod = await stage.get("pods", "demo-generator-a", CORE)
    assert {c["type"]: c["status"] for c in pod["status"]["conditions"]}["refit.dev/synced"] == "True"
    version = await stage.until("weightversions", f"demo-v{number:09d}", lambda v: condition(v, "Converged")[0] == "True")
    assert version["status"]["phase"] == "Ready"
    group = await stage.until("refitgroups", "demo", lambda g: condition(g, "WeightsCurrent")[0] == "True")
    status = group["status"]
    assert (status["targetVersion"], status["currentVersion"], status["generators"]["atTarget"]) == (number, number, 1)
    assert status["lastRefit"]["wireSeconds"] == 0.5
