"""One pass over one group: observe, decide, act. Everything that is decided is decided in `decide`; here are only the effects, in their order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import structlog
from refit_api.dialect import from_api
from refit_api.errors import RefitError, SpecError
from refit_api.names import Reason
from refit_api.v1alpha1 import RefitGroupSpec
from refit_api.wire import GroupRef

from refit_operator import gauges, resources, writes
from refit_operator.decide import actions
from refit_operator.decide.facts import Observed, Verdict
from refit_operator.decide.group import Decision, Site, decide, let_go, refuse
from refit_operator.decide.memory import Memory
from refit_operator.decide.target import Problem
from refit_operator.ports import Catalog, Clock, Cluster, Seen, Watched
from refit_operator.recorded import recorded, terms

log = structlog.get_logger(__name__)

STATUS_INTERVAL = {"RefitGroup": 1.0, "WeightVersion": 5.0}
_REFUSED_AGAIN = 60.0  # what the cluster refused may have changed without an event


@dataclass(slots=True)
class Reconciler:
    """`site` is asked each time: the CA rotates."""

    watched: Watched
    cluster: Cluster
    catalog: Catalog
    clock: Clock
    site: Callable[[], Site]
    children: writes.Children = field(default_factory=writes.Children)
    statuses: writes.Statuses = field(default_factory=lambda: writes.Statuses(STATUS_INTERVAL))
    memories: dict[GroupRef, Memory] = field(default_factory=dict)
    verdicts: dict[tuple[GroupRef, str], tuple[str, Verdict]] = field(default_factory=dict)

    async def __call__(self, key: GroupRef) -> float | None:
        """Returns the seconds until the next pass that nothing else would cause; None when the group is gone for good."""
        seen = self._newest(self.watched.see(key))
        if seen.group is None or seen.manifest is None:
            return await self._gone(key, seen)
        now = self.clock.time()
        memory = self.memories.get(key, Memory())
        try:
            spec = from_api(RefitGroupSpec, seen.manifest.get("spec"))
        except SpecError as error:
            return await self._act(key, seen, refuse(Problem(Reason.INVALID_SPEC, error.message), seen.group, memory, now))
        if spec.managed_by is not None:
            return float("inf")  # another controller's
        await self.catalog.open(key, terms(seen.group, spec), recorded(seen))
        observed = Observed(seen.pods, seen.children, seen.records, await self.catalog.facts(key), await self._judge(key, seen, spec))
        decision = decide(spec, seen.group, observed, self.site(), memory, now)
        gauges.show(key, observed)
        try:
            return await self._act(key, seen, decision)
        except SpecError as error:
            trouble = Problem(error.facts.get("reason", Reason.INVALID_SPEC), error.message)
            wait = await self._act(key, seen, refuse(trouble, seen.group, memory, now))
            return _REFUSED_AGAIN if wait is None else min(wait, _REFUSED_AGAIN)

    def _newest(self, seen: Seen) -> Seen:
        """Our own last statuses, where the watch is behind."""
        if seen.group is None:
            return seen
        group = replace(seen.group, status=self.statuses.newest(seen.group.uid, seen.group.status, seen.group.revision))
        records = tuple(replace(r, status=self.statuses.newest(r.uid, r.status, r.revision)) for r in seen.records)
        return replace(seen, group=group, records=records)

    async def _judge(self, key: GroupRef, seen: Seen, spec: RefitGroupSpec) -> Mapping[str, Verdict]:
        """The API server's word on each workload, asked once for each template."""
        assert seen.group is not None, "only groups that are there are judged"
        verdicts: dict[str, Verdict] = {}
        for workload in resources.workloads(seen.group, spec):
            kind = str(workload["kind"])
            wanted = writes.digest(workload["spec"]["template"])
            asked, verdict = self.verdicts.get((key, kind), ("", None))
            if verdict is None or asked != wanted:
                verdict = await self.cluster.dry_run(workload)
                self.verdicts[key, kind] = wanted, verdict
            verdicts[kind] = verdict
        return verdicts

    async def _gone(self, key: GroupRef, seen: Seen) -> float | None:
        """The group's object is away: its versions end, then the catalog forgets it."""
        facts = await self.catalog.facts(key)
        observed = Observed(records=seen.records, catalog=facts)
        wait = await self._act(key, seen, let_go(observed, 0.0 if not facts.generators else _REFUSED_AGAIN, Memory(), self.clock.time()))
        if seen.records:
            return wait if wait is not None else _REFUSED_AGAIN
        await self.catalog.forget(key)
        self._forget(key)
        return None

    def _forget(self, key: GroupRef) -> None:
        self.memories.pop(key, None)
        for kind in ("StatefulSet", "Deployment"):
            self.verdicts.pop((key, kind), None)
        self.children.forget(key.namespace, frozenset((resources.shared_name(key.name), resources.trainer_name(key.name), resources.generator_name(key.name))))
        gauges.forget(key)

    async def _act(self, key: GroupRef, seen: Seen, decision: Decision) -> float | None:
        waits = [decision.requeue_after] if decision.requeue_after is not None else []
        for action in decision.actions:
            wait = await self._carry_out(key, seen, action)
            if wait:
                waits.append(wait)
        self.memories[key] = decision.memory
        return min(waits) if waits else float("inf")

    async def _carry_out(self, key: GroupRef, seen: Seen, action: actions.Action) -> float:
        """Returns the seconds after which a held back write may go out; 0 when it is done."""
        space, now = key.namespace, self.clock.time()
        match action:
            case actions.WriteStatus():
                return await self._write(key, action, now)
            case actions.Apply(manifest):
                await self._apply(seen, manifest, now)
            case actions.MarkPod(name, uid, synced, message):
                await self.cluster.mark_pod(space, name, uid, synced, message, now)
            case actions.CreateRecord(manifest):
                await self.cluster.create_record(manifest)
            case actions.ReleaseRecord(name, uid):
                await self.cluster.release_record(space, name, uid)
                self.statuses.forget(uid)
            case actions.Delete(kind, name, uid):
                await self.cluster.delete(kind, space, name, uid)
            case actions.Announce():
                await self._announce(space, action, now)
            case _:
                await self._tell(key, action)
        return 0.0

    async def _tell(self, key: GroupRef, action: actions.Action) -> None:
        """What the catalog is told."""
        match action:
            case actions.Assign():
                await self.catalog.assign(key, action.pod_uid, action.instance, action.target, action.order, action.sources, action.deadline_seconds)
            case actions.Confirm(epoch, ceiling, records):
                await self.catalog.confirm(key, epoch, ceiling, records)
            case actions.Protect(numbers, current):
                await self.catalog.protect(key, numbers, current)
            case actions.Retire(number, reason):
                await self.catalog.retire(key, number, reason)
            case actions.Abort(number, reason):
                await self.catalog.abort(key, number, reason)
            case actions.RemoveVersion(number):
                await self.catalog.remove(key, number)
            case _:
                raise AssertionError(f"nobody carries out {action}")

    async def _apply(self, seen: Seen, manifest: Mapping[str, object], now: float) -> None:
        metadata = manifest["metadata"]
        assert isinstance(metadata, dict), "children are made by resources"
        shown = next((c for c in seen.children if c.kind == manifest["kind"] and c.name == metadata["name"]), None)
        if not self.children.stale(manifest, shown, now):
            return
        if shown is None:
            await self.cluster.claim(manifest)
        self.children.written(manifest, await self.cluster.apply(manifest), now)

    async def _write(self, key: GroupRef, action: actions.WriteStatus, now: float) -> float:
        wait = self.statuses.wait(action.kind, action.uid, action.urgent, now)
        if wait:
            gauges.held_back(action.kind)
            return wait
        stamp = await self.cluster.write_status(action.kind, key.namespace, action.name, action.uid, action.status)
        self.statuses.written(action.uid, action.status, stamp, now)
        gauges.status(key, action)
        return 0.0

    async def _announce(self, namespace: str, event: actions.Announce, now: float) -> None:
        try:
            await self.cluster.post_event(namespace, event, now)
        except RefitError as error:  # the condition carries the truth; an event is a courtesy
            log.warning("event lost", namespace=namespace, reason=event.reason, error=error.message)
