"""Pictures of a group, made from a few words: what the watch and the catalog would show."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from refit_api.dialect import from_api
from refit_api.v1alpha1 import RefitGroupSpec
from refit_api.wire import Assignment, CoordinateSources, Endpoint, ErrorDetail, Order, RankPhase, RankReport, Role, Source, Version, VersionPhase, WorkerRef
from refit_operator.decide.facts import (
    CatalogFacts,
    Child,
    Generator,
    GeneratorRank,
    Group,
    Observed,
    Pod,
    Record,
    TrainerRank,
    Verdict,
    VersionState,
)
from refit_operator.decide.group import Site
from refit_operator.decide.members import Member, members

NOW = 1_800_000_000.0
SITE = Site("refit-catalog.refit-system.svc:7450", "CA")
TEMPLATE = {"spec": {"containers": [{"name": "main", "image": "none", "ports": [{"containerPort": 8000}]}]}}
ACCEPTED = {"StatefulSet": Verdict(True), "Deployment": Verdict(True)}


def spec(replicas: int = 1, **parts: Any) -> RefitGroupSpec:
    """`generators__engine={...}` and the like reach inside."""
    whole: dict[str, Any] = {
        "model": {"name": "tiny"},
        "trainer": {"template": TEMPLATE},
        "generators": {"template": TEMPLATE, "replicas": replicas},
    }
    for path, value in parts.items():
        *outer, last = path.split("__")
        place = whole
        for step in outer:
            place = place.setdefault(step, {})
        place[last] = value
    return from_api(RefitGroupSpec, whole)


def group(**fields: Any) -> Group:
    return Group("ns", "demo", "uid-demo", generation=1, **fields)


def worker(pod: str) -> WorkerRef:
    return WorkerRef(pod, Role.GENERATOR, 0, "a")


def pod(name: str, role: Role = Role.GENERATOR, **fields: Any) -> Pod:
    return Pod(name, name, role, NOW - 100, node=fields.pop("node", "n1"), **fields)


def order(target: int, kind: Order = Order.STAGE, seq: int = 1, parent: str = "") -> Assignment:
    sources = (CoordinateSources("tp0", (Source(worker(parent), ENDPOINT, coordinate="tp0"),)),) if parent else ()
    return Assignment(1, seq, target, kind, sources, 600.0)


ENDPOINT = Endpoint("10.0.0.1", 7451, "PEM")


def generator(name: str, *, serving: int = 0, arena: int = 0, kept: int = 0, staging: int = 0, progress: float = 0.0, **fields: Any) -> Generator:
    """`arena`, `kept`: staged completely. What is staged or being staged is offered, unless `offers` says otherwise."""
    phase = RankPhase.STAGING if staging else RankPhase.SERVING if serving and serving == arena else RankPhase.STAGED if arena else RankPhase.IDLE
    phase = fields.pop("phase", phase)
    report = RankReport(
        worker(name),
        "tp0",
        phase,
        serving=serving,
        arena=arena or staging,
        arena_complete=bool(arena),
        staging=staging,
        kept=kept,
        verified=int(progress * 1000),
        bytes=1000,
    )
    offers = fields.pop("offers", {**({arena: True} if arena else {}), **({kept: True} if kept else {}), **({staging: False} if staging else {})})
    made = Generator(name, "0", "class-a", True, (GeneratorRank(worker(name), "tp0", ENDPOINT, report),), offers=offers)
    assignment: Assignment | None = fields.pop("assignment", None)
    heard = fields.pop("heard", (assignment.catalog_epoch, assignment.seq) if assignment else (0, 0))
    return replace(made, assignment=assignment, heard=heard, **fields)


def state(number: int, phase: VersionPhase = VersionPhase.READY, **fields: Any) -> VersionState:
    version = Version(number, f"run:{number}", "run", number, "plan", ("0",), phase, root=b"\x01", bytes=1 << 30, reason=fields.pop("reason", ""))
    return VersionState(version, 1, 1 << 30, NOW - 60, **{"ready_at": NOW - 50, "offered": phase is VersionPhase.READY, "trainers": 1, **fields})


def catalog(*generators: Generator, versions: tuple[VersionState, ...] = (), **fields: Any) -> CatalogFacts:
    trainers = (TrainerRank(WorkerRef("demo-trainer-0", Role.TRAINER, 0, "a"), "run"),)
    return replace(CatalogFacts(epoch=1, settled=True, world=1, trainers=trainers, generators=generators, versions=versions), **fields)


def observed(facts: CatalogFacts, *, pods: tuple[Pod, ...] | None = None, records: tuple[Record, ...] = (), **fields: Any) -> Observed:
    """With a trainer pod, a pod for each generator, and settled children."""
    made = (pod("demo-trainer-0", Role.TRAINER, ready=True), *(pod(g.pod_uid, ready=True, synced=True) for g in facts.generators)) if pods is None else pods
    fleet = sum(p.role is Role.GENERATOR for p in made)
    children = (
        Child("StatefulSet", "demo-trainer", "s", "uid-demo", wanted=1, pods=1, updated=1, ready=1),
        Child("Deployment", "demo-generator", "d", "uid-demo", wanted=fleet, pods=fleet, updated=fleet, ready=fleet),
    )
    return replace(Observed(made, children, records, facts, ACCEPTED), **fields)


def record(number: int, **fields: Any) -> Record:
    made = Record(f"demo-v{number:09d}", f"uid-{number}", number, number, "run", f"run:{number}", "plan", 1, NOW - 60)
    return replace(made, **fields)


def fleet(facts: CatalogFacts) -> tuple[Member, ...]:
    return members(observed(facts), 0)


def failure(kind: str = "DigestMismatch", retry_after: float | None = None) -> ErrorDetail:
    return ErrorDetail(kind, "it did not work", retry_after)
