"""The error tree, by who must act. Every message names the object, the field, what was seen, what was expected and what to do.

Without `retry_after` the work waits for a change; with it, the same call may be repeated after that many seconds.
Bugs stay `AssertionError`. Errors travel between processes as `(type name, message, facts)`: see `wire.ErrorDetail`.
"""

from __future__ import annotations

from typing import ClassVar


class RefitError(Exception):
    """`facts` are strings for people and machines: seen, expected, tensor, peer and the like. Never a secret."""

    acts: ClassVar[str] = "nobody"

    def __init__(self, message: str, *, retry_after: float | None = None, **facts: object) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after = retry_after
        self.facts: dict[str, str] = {name: str(value) for name, value in facts.items() if value is not None}


class SpecError(RefitError):
    """The author of the object or file must change it; the message names the field and the allowed values."""

    acts = "the author of the object"


class InvalidCase(SpecError):
    """A case file that is wrong in itself (exit 2)."""


class PlanError(RefitError):
    """Two layouts do not fit each other."""

    acts = "the model's owner, or the authors of Refit"


class UnsupportedLayout(PlanError):
    """Unknown role, head geometry, divisibility, stages, names given twice, expert maps."""


class UnknownTensor(PlanError):
    """Needed by an engine, held by no trainer rank."""


class DtypeMismatch(PlanError):
    """Shards, needs or parameters of one tensor disagree about the dtype."""


class ShapeMismatch(PlanError):
    """Shards, needs or parameters disagree about a shape; both are named."""


class OverlappingPlan(PlanError):
    """A byte would be written twice, or shards of one replica overlap."""


class IncompletePlan(PlanError):
    """Holes in the shards or in the parameters; every missing box is listed."""


class PeerError(RefitError):
    """Wait, or use another peer."""

    acts = "nobody: it is retried"


class PeerUnavailable(PeerError):
    """A source, a rank or an agent does not answer."""


class CatalogUnavailable(PeerError):
    """The catalog does not answer, or may not answer yet."""


class VersionRetired(PeerError):
    """The version takes no new leases."""


class NoClass(PeerError):
    """No engine class has registered its needs, so nothing can be planned."""


class LeaseLost(PeerError):
    """The memory may change: reads stop."""


class StaleOrder(PeerError):
    """An order or a message of an older catalog epoch, sequence or incarnation."""


class ReplicaMismatch(PeerError):
    """Ranks that must hold equal bytes sealed different roots."""


class WireMismatch(PeerError):
    """The two sides speak different protocol versions, or compute different plans; both are named."""


class Denied(PeerError):
    """The caller is unknown, of another group, of the wrong role, or too fast."""


class TransferError(RefitError):
    """The cluster's network or memory failed."""

    acts = "the cluster's operator"


class TransferTimeout(TransferError):
    """A read did not end in time; names the peer and the bytes of the total that arrived."""


class DigestMismatch(TransferError):
    """Bytes that are not those that were published; names tensor, box, block and source."""


class InstallError(RefitError):
    """The engine could not take the version."""

    acts = "the engine's owner"


class EngineBusy(InstallError):
    """Requests did not drain in time."""


class EngineHung(InstallError):
    """A rank or an engine core gave no answer in time. In a commit the engine is fenced and ends, so that the kubelet starts it again."""


class EngineTooOld(InstallError):
    """The engine lacks what this use needs; the version that has it is named."""


class EngineMismatch(InstallError):
    """The engine's needs changed, or it is set up in a way that Refit refuses."""


class MixedRanks(InstallError):
    """Ranks of one engine hold different versions: fenced until a full install succeeds."""


class ManagedByOperator(InstallError):
    """A framework called what only the operator may order in a managed group."""


def _tree(root: type[RefitError]) -> dict[str, type[RefitError]]:
    found = {root.__name__: root}
    for child in root.__subclasses__():
        found |= _tree(child)
    return found


BY_NAME: dict[str, type[RefitError]] = _tree(RefitError)
