"""What a pass decided, carried out: one action after the other, until one fails. Nothing is decided here but when a write may go out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import structlog
from refit_api.errors import RefitError
from refit_api.wire import GroupRef

from refit_operator import gauges, writes
from refit_operator.decide import actions
from refit_operator.decide.facts import CatalogFacts, Verdict
from refit_operator.decide.memory import Memory
from refit_operator.ports import Catalog, Clock, Cluster, Seen

log = structlog.get_logger(__name__)

_COLLECTED_WITHIN = 2.0  # by the garbage collector, mostly
STATUS_INTERVAL = {"RefitGroup": 1.0, "WeightVersion": 5.0}


@dataclass(slots=True)
class Kept:
    """What this process remembers of one group, by the uid that it has. `verdicts`: by kind, what was asked, the answer, when.

    `picture`: what the last pass saw; until `due` the same picture needs no pass.
    """

    uid: str
    memory: Memory = field(default_factory=Memory)
    children: writes.Children = field(default_factory=writes.Children)
    statuses: writes.Statuses = field(default_factory=lambda: writes.Statuses(STATUS_INTERVAL))
    verdicts: dict[str, tuple[str, Verdict, float]] = field(default_factory=dict)
    picture: tuple[Seen, CatalogFacts] | None = None
    due: float = 0.0


@dataclass(frozen=True, slots=True)
class Effects:
    """Of one pass."""

    cluster: Cluster
    catalog: Catalog
    clock: Clock
    key: GroupRef
    seen: Seen
    kept: Kept

    async def carry_out(self, decided: Sequence[actions.Action]) -> float:
        """Returns the seconds after which there is something to write again; infinity when there is not."""
        waits = [await self._one(action) for action in decided]
        return min((wait for wait in waits if wait), default=float("inf"))

    async def _one(self, action: actions.Action) -> float:
        space, now = self.key.namespace, self.clock.time()
        match action:
            case actions.WriteStatus():
                return await self._write(action, now)
            case actions.Apply(manifest):
                return await self._apply(manifest, now)
            case actions.MarkPod(name, uid, synced, message):
                await self.cluster.mark_pod(space, name, uid, synced, message, now)
            case actions.CreateRecord(manifest):
                await self.cluster.create_record(manifest)
            case actions.ReleaseRecord(name, uid):
                await self.cluster.release_record(space, name, uid)
                self.kept.statuses.forget(uid)
            case actions.Delete(kind, name, uid):
                await self.cluster.delete(kind, space, name, uid)
            case actions.Announce():
                await self._announce(action, now)
            case _:
                await self._tell(action)
        return 0.0

    async def _tell(self, action: actions.Action) -> None:
        """What the catalog is told."""
        match action:
            case actions.Assign():
                await self.catalog.assign(self.key, action.pod_uid, action.instance, action.target, action.order, action.sources, action.deadline_seconds)
            case actions.Confirm(epoch, ceiling, records):
                await self.catalog.confirm(self.key, epoch, ceiling, records)
            case actions.Protect(numbers, current):
                await self.catalog.protect(self.key, numbers, current)
            case actions.Retire(number, reason):
                await self.catalog.retire(self.key, number, reason)
            case actions.Abort(number, reason):
                await self.catalog.abort(self.key, number, reason)
            case actions.RemoveVersion(number):
                await self.catalog.remove(self.key, number)
            case _:
                raise AssertionError(f"nobody carries out {action}")

    async def _apply(self, manifest: Mapping[str, Any], now: float) -> float:
        shown = next((c for c in self.seen.children if c.kind == manifest["kind"] and c.name == manifest["metadata"]["name"]), None)
        due = self.kept.children.due(manifest, shown, now)
        if due:
            return due
        former = shown.owner not in ("", self.kept.uid) if shown is not None else not await self.cluster.claim(manifest)
        if former:
            return _COLLECTED_WITHIN
        self.kept.children.written(manifest, await self.cluster.apply(manifest), now)
        return 0.0

    async def _write(self, action: actions.WriteStatus, now: float) -> float:
        statuses = self.kept.statuses
        wait = statuses.wait(action.kind, action.uid, action.urgent, now)
        if wait:
            gauges.held_back(action.kind)
            return wait
        stamp = await self.cluster.write_status(action.kind, self.key.namespace, action.name, action.uid, action.status)
        before = next((record.status for record in self.seen.records if record.uid == action.uid), {})
        gauges.status(self.key, action, before)
        statuses.written(action.uid, action.status, stamp, now)
        return 0.0

    async def _announce(self, event: actions.Announce, now: float) -> None:
        try:
            await self.cluster.post_event(self.key.namespace, event, now)
        except RefitError as error:  # the condition carries the truth; an event is a courtesy
            log.warning("event lost", namespace=self.key.namespace, reason=event.reason, error=error.message)
