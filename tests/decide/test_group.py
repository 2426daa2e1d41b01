"""A whole pass: what is applied, what is said, and that saying it twice says nothing new."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from refit_api.status import RefitGroupStatus
from refit_api.wire import Order, Role, VersionPhase
from refit_operator.decide.actions import Action, Announce, Apply, Assign, Confirm, CreateRecord, Delete, MarkPod, Protect, ReleaseRecord, WriteStatus
from refit_operator.decide.facts import CatalogFacts, Child, Observed, Record, Verdict, Wants
from refit_operator.decide.group import Decision, decide
from refit_operator.decide.memory import Memory

from tests.decide.world import NOW, SITE, catalog, failure, generator, group, observed, order, pod, record, spec, state

SERVES = {"serving": 2, "arena": 2, "assignment": order(2, Order.COMMIT)}
V2 = (state(2),)


def run(seen: Observed, status: dict[str, Any] | None = None, replicas: int = 1, memory: Memory | None = None, now: float = NOW, **parts: Any) -> Decision:
    return decide(spec(replicas, **parts), group(status=status or {}), seen, SITE, memory or Memory(), now)


def only(actions: Sequence[Action], kind: type[Any]) -> list[Any]:
    return [action for action in actions if isinstance(action, kind)]


def status_of(decision: Decision) -> RefitGroupStatus:
    (written,) = [w for w in only(decision.actions, WriteStatus) if w.kind == "RefitGroup"]
    return RefitGroupStatus.model_validate(written.status)


def conditions(decision: Decision) -> dict[str, tuple[str, str]]:
    return {c.type: (c.status, c.reason) for c in status_of(decision).conditions}


@dataclass(frozen=True)
class Row:
    """`says`: conditions with status and reason that must be so; others are not looked at."""

    protects: str
    seen: Observed
    says: dict[str, tuple[str, str]]
    replicas: int = 1
    spec: dict[str, Any] = field(default_factory=dict)
    status: dict[str, Any] = field(default_factory=dict)
    phase: str = ""


NOTHING = Observed(catalog=catalog(trainers=(), world=0))
GOOD = ("False", "NothingWrong")
ROWS = [
    Row(
        "at first there is nothing, and it says so",
        NOTHING,
        {"Ready": ("False", "CreatingPods"), "Reconciling": ("True", "CreatingPods"), "Stalled": GOOD},
        phase="Reconciling",
    ),
    Row(
        "pods without a registered engine",
        observed(catalog(), pods=(pod("demo-trainer-0", Role.TRAINER), pod("a"))),
        {"Ready": ("False", "WaitingForGenerators")},
    ),
    Row("a trainer that has not registered", observed(catalog(generator("a"), trainers=(), world=0)), {"Ready": ("False", "WaitingForTrainers")}),
    Row(
        "all there, nothing published",
        observed(catalog(generator("a"))),
        {"Ready": ("False", "WaitingForPublish"), "WeightsCurrent": ("False", "WaitingForPublish"), "Stalled": GOOD},
    ),
    Row("a version on its way", observed(catalog(generator("a", staging=2, assignment=order(2)), versions=V2)), {"Ready": ("False", "RollingOut")}),
    Row(
        "all is well",
        observed(catalog(generator("a", **SERVES), versions=V2)),
        {
            "Ready": ("True", "EnoughGenerators"),
            "WeightsCurrent": ("True", "AllAtTarget"),
            "Reconciling": ("False", "Settled"),
            "Stalled": GOOD,
            "Degraded": GOOD,
            "Suspended": ("False", "NotSuspended"),
            "TemplateValid": ("True", "DryRunPassed"),
        },
        phase="Ready",
    ),
    Row(
        "a newer version does not turn Ready off",
        observed(catalog(generator("a", **SERVES), versions=(*V2, state(3)))),
        {"Ready": ("True", "EnoughGenerators"), "WeightsCurrent": ("False", "RollingOut")},
        phase="Ready",
    ),
    Row(
        "too few serve",
        observed(catalog(generator("a", **SERVES), generator("b"), versions=V2)),
        {"Ready": ("False", "RollingOut")},
        2,
        {"generators__minAvailable": 2},
    ),
    Row("no generators are wanted, none are missed", observed(catalog(versions=V2)), {"Ready": ("True", "EnoughGenerators")}, replicas=0),
    Row(
        "a field of a later release is named",
        observed(catalog(generator("a"))),
        {"Stalled": ("True", "NotImplemented")},
        spec={"trainer__hostCopies": 1},
        phase="Stalled",
    ),
    Row(
        "a refused template is in the author's face",
        replace(observed(catalog()), verdicts={"Deployment": Verdict(False, 'unknown field "spec.template.spec.containers[0].imagee"')}),
        {"Stalled": ("True", "InvalidTemplate"), "TemplateValid": ("False", "InvalidTemplate")},
    ),
    Row(
        "quota and policy of the cluster",
        replace(observed(catalog()), children=(Child("Deployment", "demo-generator", "d", "uid-demo", wanted=1, trouble="exceeded quota: pods"),)),
        {"Stalled": ("True", "PodsRefused")},
    ),
    Row(
        "a pin that nobody holds",
        observed(catalog(generator("a", **SERVES), versions=V2)),
        {"Stalled": ("True", "VersionNotFound"), "Ready": ("True", "EnoughGenerators")},
        spec={"rollout": {"policy": "Pinned", "pinnedVersion": 7}},
    ),
    Row(
        "layouts that do not fit",
        observed(catalog(generator("a", assignment=order(2), error=failure("ShapeMismatch")), versions=V2)),
        {"Stalled": ("True", "ImpossibleRefit"), "Degraded": ("True", "GeneratorsFailed")},
    ),
    Row(
        "an engine that cannot take part",
        observed(catalog(generator("a", assignment=order(2), error=failure("EngineTooOld")), versions=V2)),
        {"Stalled": ("True", "EngineTooOld")},
    ),
    Row(
        "a fenced generator",
        observed(catalog(generator("a", **SERVES), generator("b", fenced=True, **SERVES), versions=V2)),
        {"Degraded": ("True", "GeneratorsFenced"), "Ready": ("True", "EnoughGenerators")},
        replicas=2,
        phase="Degraded",
    ),
    Row(
        "a trainer that crashes",
        observed(
            catalog(generator("a", **SERVES), versions=V2),
            pods=(pod("demo-trainer-0", Role.TRAINER, trouble="container main: CrashLoopBackOff"), pod("a", ready=True, synced=True)),
        ),
        {"Degraded": ("True", "TrainersFailing"), "Ready": ("True", "EnoughGenerators")},
    ),
    Row(
        "suspended",
        observed(catalog(), pods=()),
        {"Suspended": ("True", "SuspendRequested"), "Ready": ("False", "SuspendRequested")},
        spec={"suspend": True},
        phase="Suspended",
    ),
    Row(
        "after the operator's restart nobody is missed before a lease time has passed",
        observed(
            catalog(settled=False, epoch=2, versions=V2, trainers=()), pods=(pod("demo-trainer-0", Role.TRAINER, ready=True), pod("a", ready=True, synced=True))
        ),
        {"Ready": ("True", "EnoughGenerators"), "WeightsCurrent": ("True", "AllAtTarget")},
        status={"currentVersion": 2},
    ),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.protects.replace(" ", "-"))
def test_conditions(row: Row) -> None:
    decision = run(row.seen, row.status, row.replicas, **row.spec)
    said = conditions(decision)
    assert {kind: said[kind] for kind in row.says} == row.says
    assert row.phase in ("", status_of(decision).phase)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.protects.replace(" ", "-"))
def test_the_second_look_writes_and_announces_nothing(row: Row) -> None:
    """Level-based: what is as it should be stays unwritten; transition times do not move."""
    first = run(row.seen, row.status, row.replicas, **row.spec)
    (written,) = [w for w in only(first.actions, WriteStatus) if w.kind == "RefitGroup"]
    second = run(row.seen, dict(written.status), row.replicas, first.memory, NOW + 1, **row.spec)
    assert only(second.actions, WriteStatus) == []
    assert only(second.actions, Announce) == []


MANUAL = {"rollout__policy": "Manual"}


@pytest.mark.parametrize(
    ("facts", "expected", "failed"),
    [
        pytest.param(catalog(generator("a", **SERVES), versions=V2), ("AllAtTarget", "EnoughGenerators", "NothingWrong"), 0, id="it has the newest"),
        pytest.param(
            catalog(generator("a", serving=1, arena=1), versions=V2), ("FrameworkDriven", "EnoughGenerators", "NothingWrong"), 0, id="when it likes"
        ),
        pytest.param(
            catalog(generator("a", serving=1, arena=1, error=failure()), versions=V2),
            ("GeneratorsFailed", "EnoughGenerators", "GeneratorsFailed"), 1, id="what kept it from it",
        ),
        pytest.param(
            catalog(generator("a", fenced=True, error=failure()), versions=V2), ("GeneratorsFailed", "GeneratorsFailed", "GeneratorsFenced"), 1, id="fenced"
        ),
    ],
)  # fmt: skip
def test_a_group_that_its_framework_drives(facts: CatalogFacts, expected: tuple[str, str, str], failed: int) -> None:
    """No order, no deadline: what generators serve and what went wrong is told all the same."""
    seen = observed(facts)
    first = run(seen, **MANUAL)
    late = run(seen, memory=first.memory, now=NOW + 10_000, **MANUAL)
    for decision in (first, late):
        said = conditions(decision)
        assert (said["WeightsCurrent"][1], said["Ready"][1], said["Degraded"][1]) == expected
        assert said["Stalled"] == GOOD
        assert only(decision.actions, Assign) == []
    counted = status_of(late).generators
    assert counted is not None
    assert counted.failed == failed


FAILED_AT_2 = {"serving": 1, "arena": 1, "assignment": order(2)}
FINAL, PASSES, GONE = failure("InstallError"), failure("TransferTimeout", 1.0), failure("VersionRetired")


@pytest.mark.parametrize(
    ("facts", "records", "parts", "refused"),
    [
        pytest.param(catalog(generator("a", **FAILED_AT_2, error=FINAL)), (), {}, True, id="it cannot be installed"),
        pytest.param(catalog(generator("a", **FAILED_AT_2, error=PASSES)), (), {}, False, id="it may pass"),
        pytest.param(catalog(generator("a", **FAILED_AT_2, error=GONE)), (), {}, False, id="a peer's fault says nothing of it"),
        pytest.param(catalog(generator("a", **FAILED_AT_2, error=FINAL)), (), {"rollout__onFailure": "Retry"}, False, id="not asked for"),
        pytest.param(catalog(generator("a", **FAILED_AT_2, error=FINAL)), (), {"rollout__paused": True}, False, id="not while paused"),
        pytest.param(
            catalog(generator("a", **FAILED_AT_2, error=FINAL)), (record(2, status={"convergedAt": "2027-01-01T00:00:00Z"}),), {}, False, id="all served it"
        ),
        pytest.param(catalog(generator("a", assignment=order(2), fenced=True, error=FINAL)), (), {}, False, id="nothing to go back to"),
        pytest.param(
            catalog(generator("a", assignment=order(2), fenced=True, error=FINAL), generator("b", serving=1)), (), {}, True, id="a peer serves the one before"
        ),
    ],
)
def test_what_is_taken_back(facts: CatalogFacts, records: tuple[Record, ...], parts: dict[str, Any], refused: bool) -> None:
    spec_parts = {"rollout__onFailure": "Rollback", "generators__engine": {"keepPrevious": True}, **parts}
    held = replace(facts, versions=(state(1, offered=False, trainers=0), state(2)))
    decision = run(observed(held, records=records), replicas=2, **spec_parts)
    assert dict(decision.memory.refused) == ({2: "pod a: InstallError: it did not work"} if refused else {})


def test_a_version_that_is_taken_back_says_why_for_good() -> None:
    """Its WeightVersion remembers what this process may forget; an event tells once."""
    parts = {"rollout__onFailure": "Rollback", "generators__engine": {"keepPrevious": True}}
    facts = catalog(generator("a", **FAILED_AT_2, error=FINAL), versions=(state(1), state(2)))
    first = run(observed(facts, records=(record(1), record(2))), **parts)
    status = next(dict(w.status) for w in only(first.actions, WriteStatus) if w.uid == "uid-2")
    back = next(c for c in status["conditions"] if c["type"] == "Rejected")
    assert (back["status"], back["reason"], back["message"]) == ("True", "RolledBack", "pod a: InstallError: it did not work")
    assert [(event.name, event.reason) for event in only(first.actions, Announce) if event.kind == "WeightVersion"] == [("demo-v000000002", "RolledBack")]
    again = run(observed(facts, records=(record(1), record(2, status=status))), **parts)
    assert status_of(again).target_version == 1
    assert [w for w in only(again.actions, WriteStatus) if w.uid == "uid-2"] == []
    assert [event for event in only(again.actions, Announce) if event.kind == "WeightVersion"] == []


def test_nothing_is_applied_while_the_spec_is_refused() -> None:
    """Fail closed: the group goes on as it is."""
    decision = run(observed(catalog(generator("a", staging=2), versions=V2)), trainer__hostCopies=1)
    assert only(decision.actions, Apply) == []
    assert "spec.trainer.hostCopies" in next(c.message for c in status_of(decision).conditions if c.type == "Stalled")


def test_the_message_of_a_missing_pin_lists_what_can_be_pinned() -> None:
    decision = run(observed(catalog(generator("a", **SERVES), versions=(state(1), state(2)))), rollout={"policy": "Pinned", "pinnedVersion": 7})
    assert "versions with holders: 1, 2" in next(c.message for c in status_of(decision).conditions if c.type == "Stalled")


def test_a_transition_is_announced_once_with_the_condition_s_reason() -> None:
    first = run(observed(catalog(generator("a", staging=2, assignment=order(2)), versions=V2)))
    (before,) = [w for w in only(first.actions, WriteStatus) if w.kind == "RefitGroup"]
    events = only(run(observed(catalog(generator("a", **SERVES), versions=V2)), dict(before.status)).actions, Announce)
    assert [(event.reason, event.warning) for event in events] == [("EnoughGenerators", False)]
    (ready,) = [w for w in only(run(observed(catalog(generator("a", **SERVES), versions=V2))).actions, WriteStatus) if w.kind == "RefitGroup"]
    lost = only(run(observed(catalog(generator("a", fenced=True, **SERVES), versions=V2)), dict(ready.status)).actions, Announce)
    assert ("GeneratorsFenced", True) in [(event.reason, event.warning) for event in lost]


def test_steps_are_no_events() -> None:
    """A version every ten seconds must not fill the event list."""
    (ready,) = [w for w in only(run(observed(catalog(generator("a", **SERVES), versions=V2))).actions, WriteStatus) if w.kind == "RefitGroup"]
    newer = observed(catalog(generator("a", **SERVES), versions=(*V2, state(3))))
    assert only(run(newer, dict(ready.status)).actions, Announce) == []


def test_what_the_catalog_waits_for_is_written_before_it_is_vouched_for() -> None:
    facts = catalog(generator("a"), versions=(state(5, VersionPhase.PUBLISHING),), wants=Wants(epoch=3, ceiling=200, records=(5,)))
    actions = run(observed(facts)).actions
    (created,), (confirmed,) = only(actions, CreateRecord), only(actions, Confirm)
    assert created.manifest["metadata"]["name"] == "demo-v000000005"
    assert created.manifest["metadata"]["finalizers"] == ["refit.dev/lease-drain"]
    assert (confirmed.epoch, confirmed.ceiling, confirmed.records) == (3, 200, frozenset({5}))
    (written,) = [w for w in only(actions, WriteStatus) if w.kind == "RefitGroup"]
    assert (written.status["catalogEpoch"], written.status["versionCeiling"], written.urgent) == (3, 200, True)
    assert actions.index(created) < actions.index(written) < actions.index(confirmed)


@pytest.mark.parametrize(
    ("seen", "marks"),
    [
        pytest.param(observed(catalog(generator("a")), pods=(pod("a"),)), [("a", False)], id="a new pod is not synced"),
        pytest.param(observed(catalog(generator("a", **SERVES)), pods=(pod("a", synced=False),)), [("a", True)], id="it is when it serves"),
        pytest.param(observed(catalog(generator("a", **SERVES)), pods=(pod("a", synced=True),)), [], id="and is not told twice"),
        pytest.param(observed(catalog(generator("a", fenced=True, **SERVES)), pods=(pod("a", synced=True),)), [("a", False)], id="fenced: no more requests"),
        pytest.param(observed(catalog(), pods=(pod("a", synced=True),)), [], id="who is not heard of keeps its gate"),
        pytest.param(observed(catalog(generator("a", whole=False)), pods=(pod("a", synced=True),)), [], id="nor is half an engine judged"),
    ],
)
def test_the_readiness_gate(seen: Observed, marks: list[tuple[str, bool]]) -> None:
    assert [(mark.name, mark.synced) for mark in only(run(seen).actions, MarkPod)] == marks


def test_versions_in_use_are_protected() -> None:
    facts = catalog(generator("a", **SERVES), versions=(*V2, state(3)), protected=frozenset())
    (protect,) = only(run(observed(facts, records=(record(1, hold=True),)), {"currentVersion": 1}).actions, Protect)
    assert (protect.numbers, protect.current) == (frozenset({1, 2, 3}), 2)


def test_trainer_pods_of_an_old_template_go_together_once_the_new_one_is_known() -> None:
    """Half a job of either template can do nothing."""
    seen = observed(catalog(), pods=(pod("demo-trainer-0", Role.TRAINER, template="old"), pod("demo-trainer-1", Role.TRAINER, template="old")))
    assert [d.name for d in only(run(seen).actions, Delete)] == ["demo-trainer-0", "demo-trainer-1"]
    behind = replace(seen, children=tuple(replace(c, settled=False) for c in seen.children))
    assert only(run(behind).actions, Delete) == []


def test_no_progress_within_the_deadline_is_stalled_and_says_what_it_waits_for() -> None:
    seen = observed(catalog(generator("a", staging=2, progress=0.2, assignment=order(2)), versions=V2))
    first = run(seen)
    assert first.requeue_after is not None
    (before,) = [w for w in only(first.actions, WriteStatus) if w.kind == "RefitGroup"]
    late = run(seen, dict(before.status), memory=run(seen, memory=first.memory, now=NOW + 1).memory, now=NOW + 700)
    assert conditions(late)["Stalled"] == ("True", "ProgressDeadlineExceeded")
    moved = observed(catalog(generator("a", staging=2, progress=0.3, assignment=order(2)), versions=V2))
    (stalled,) = [w for w in only(late.actions, WriteStatus) if w.kind == "RefitGroup"]
    assert conditions(run(moved, dict(stalled.status), memory=late.memory, now=NOW + 701))["Stalled"] == GOOD


def test_waiting_for_a_trainer_that_thinks_is_no_stall() -> None:
    seen = observed(catalog(generator("a", **SERVES), versions=V2))
    memory = run(seen).memory
    assert conditions(run(seen, memory=memory, now=NOW + 10_000))["Stalled"] == GOOD


def test_a_version_that_is_let_go_is_not_written_to() -> None:
    """Its object goes with the finalizer; a write would fail the pass."""
    seen = observed(catalog(generator("a", **SERVES), versions=V2), records=(record(1, deleted=NOW), record(2)))
    actions = run(seen).actions
    assert [action.uid for action in only(actions, ReleaseRecord)] == ["uid-1"]
    assert {action.uid for action in only(actions, WriteStatus)} == {"uid-demo", "uid-2"}


def test_a_group_that_is_being_deleted_makes_nothing() -> None:
    """Foreground deletion waits for the children: making them again would hold it up for ever."""
    going = decide(spec(), group(deleting=True), observed(catalog(generator("a"), versions=V2)), SITE, Memory(), NOW)
    assert going.actions == ()
