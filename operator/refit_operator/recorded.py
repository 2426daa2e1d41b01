"""Between the kinds and the catalog: a spec as terms, status and WeightVersions as what a catalog without memory starts from."""

from __future__ import annotations

from refit_api.v1alpha1 import RefitGroupSpec
from refit_api.wire import VersionPhase

from refit_operator.decide.facts import Group, Record
from refit_operator.ports import Recorded, RecordedVersion, Seen, Terms
from refit_operator.resources import mounted_settings


def terms(group: Group, spec: RefitGroupSpec) -> Terms:
    return Terms(
        uid=group.uid,
        model=mounted_settings(group, spec, "catalog:1").model.text,
        redundancy=spec.trainer.redundancy,
        on_busy=spec.trainer.on_busy,
        lease_seconds=float(spec.versions.lease_seconds),
        drain_seconds=float(spec.versions.drain_seconds),
        publish_deadline_seconds=float(spec.versions.publish_deadline_seconds),
        record_every=spec.versions.record_every,
        manual=spec.rollout.policy == "Manual",
        arenas=spec.trainer.arenas,
    )


def recorded(seen: Seen) -> Recorded:
    status = seen.group.status if seen.group is not None else {}
    versions = tuple(_version(record) for record in sorted(seen.records, key=lambda r: r.number))
    return Recorded(int(status.get("catalogEpoch", 0)), int(status.get("versionCeiling", 0)), versions)


def _version(record: Record) -> RecordedVersion:
    status = record.status
    return RecordedVersion(
        number=record.number,
        key=record.key,
        run_id=record.run_id,
        step=record.step,
        plan_key=record.plan_key,
        phase=VersionPhase(status.get("phase", VersionPhase.PUBLISHING.value)),
        root=bytes.fromhex(status.get("digest", "")),
        bytes=int(status.get("shards", {}).get("bytes", 0)),
        slots=record.slots,
        base=record.base,
        select=record.select,
    )
