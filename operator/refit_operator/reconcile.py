"""One pass over one group: observe, decide, act. Everything that is decided is decided in `decide`; the effects are in `effects`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from refit_api.dialect import from_api
from refit_api.errors import SpecError
from refit_api.names import Reason
from refit_api.v1alpha1 import RefitGroupSpec
from refit_api.wire import GroupRef

from refit_operator import gauges, resources, writes
from refit_operator.decide.facts import CatalogFacts, Observed, Verdict
from refit_operator.decide.group import Decision, Site, decide, let_go, refuse
from refit_operator.decide.target import Problem
from refit_operator.effects import Effects, Kept
from refit_operator.ports import Catalog, Clock, Cluster, Seen, Watched
from refit_operator.recorded import recorded, terms

_REFUSED_AGAIN = 60.0  # what the cluster refused may have changed without an event
_DRAIN_AFTER_GROUP = 60.0  # the bound of a group's own spec went with it
_LOOK_AGAIN = 300.0  # the same picture is judged anew after this, whatever was decided
FOREVER = float("inf")


@dataclass(slots=True)
class Reconciler:
    """`site` is asked each time. `kept`: what this process remembers of each group; it ends with the group."""

    watched: Watched
    cluster: Cluster
    catalog: Catalog
    clock: Clock
    site: Callable[[], Site]
    kept: dict[GroupRef, Kept] = field(default_factory=dict)

    async def __call__(self, key: GroupRef) -> float | None:
        """Returns the seconds until the next pass that nothing else would cause; None when the group is gone for good."""
        seen = self.watched.see(key)
        kept = self._kept(key, seen)
        if seen.group is None or seen.manifest is None:
            return await self._gone(key, seen, kept)
        now = self.clock.time()
        try:
            spec = from_api(RefitGroupSpec, seen.manifest.get("spec"))
        except SpecError as error:
            return await self._act(key, seen, kept, refuse(Problem(Reason.INVALID_SPEC, error.message), seen.group, kept.memory, now))
        if spec.managed_by is not None:
            return FOREVER  # another controller's
        await self.catalog.open(key, terms(seen.group, spec), recorded(seen))
        picture = (seen, await self.catalog.facts(key))
        if picture != kept.picture or now >= kept.due:
            kept.picture = None
            kept.due = now + min(await self._pass(key, _newest(seen, kept), spec, kept, picture[1]), _LOOK_AGAIN)
            kept.picture = picture
        return kept.due - now

    async def _pass(self, key: GroupRef, seen: Seen, spec: RefitGroupSpec, kept: Kept, facts: CatalogFacts) -> float:
        assert seen.group is not None, "only groups that are there get a pass"
        now = self.clock.time()
        verdicts = await self._judge(seen, spec, kept, now)
        observed = Observed(seen.pods, seen.children, seen.records, facts, verdicts)
        gauges.show(key, observed)
        try:
            wait = await self._act(key, seen, kept, decide(spec, seen.group, observed, self.site(), kept.memory, now))
        except SpecError as error:
            trouble = Problem(error.facts.get("reason", Reason.INVALID_SPEC), error.message)
            wait = await self._act(key, seen, kept, refuse(trouble, seen.group, kept.memory, now))
            return min(wait, _REFUSED_AGAIN)
        return wait if all(verdict.accepted for verdict in verdicts.values()) else min(wait, _REFUSED_AGAIN)

    def _kept(self, key: GroupRef, seen: Seen) -> Kept:
        """A group that was made anew under its old name starts anew."""
        uid = seen.group.uid if seen.group is not None else ""
        kept = self.kept.get(key)
        if kept is None or (uid and kept.uid != uid):
            kept = self.kept[key] = Kept(uid)
        return kept

    async def _judge(self, seen: Seen, spec: RefitGroupSpec, kept: Kept, now: float) -> Mapping[str, Verdict]:
        """The API server's word on each workload: once for each template, a refusal again after a while."""
        assert seen.group is not None, "only groups that are there are judged"
        verdicts: dict[str, Verdict] = {}
        for workload in resources.workloads(seen.group, spec):
            kind, wanted = str(workload["kind"]), writes.digest(workload["spec"]["template"])
            known = kept.verdicts.get(kind)
            if known is None or known[0] != wanted or (not known[1].accepted and now - known[2] >= _REFUSED_AGAIN):
                known = kept.verdicts[kind] = wanted, await self.cluster.dry_run(workload), now
            verdicts[kind] = known[1]
        return verdicts

    async def _gone(self, key: GroupRef, seen: Seen, kept: Kept) -> float | None:
        """The group's object is away: its versions end, then everybody forgets it."""
        observed = Observed(records=seen.records, catalog=await self.catalog.facts(key))
        wait = await self._act(key, seen, kept, let_go(observed, _DRAIN_AFTER_GROUP, kept.memory, self.clock.time()))
        if seen.records:
            return min(wait, _REFUSED_AGAIN)
        await self.catalog.forget(key)
        gauges.forget(key)
        del self.kept[key]
        return None

    async def _act(self, key: GroupRef, seen: Seen, kept: Kept, decision: Decision) -> float:
        wait = await Effects(self.cluster, self.catalog, self.clock, key, seen, kept).carry_out(decision.actions)
        kept.memory = decision.memory
        return min(wait, decision.requeue_after if decision.requeue_after is not None else FOREVER)


def _newest(seen: Seen, kept: Kept) -> Seen:
    """Our own last statuses, where the watch is behind."""
    assert seen.group is not None, "a group that is there"
    group = replace(seen.group, status=kept.statuses.newest(seen.group.uid, seen.group.status, seen.group.revision))
    records = tuple(replace(r, status=kept.statuses.newest(r.uid, r.status, r.revision)) for r in seen.records)
    return replace(seen, group=group, records=records)
