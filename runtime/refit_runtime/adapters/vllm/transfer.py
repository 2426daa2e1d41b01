"""The back-end `refit` of vLLM's weight-transfer API: a framework that drives engines through that API drives generators of ours.

An update names a version; no weights, addresses or secrets pass through the API, since both sides are members of the group by their mounted settings.
Weights are verified and installed by the rank that the worker made; the engine of vLLM's is only the way to it.

Since vLLM 0.32 the back-end starts and finishes an update. Before, the worker does: it hands over a function that loads weights, which is not used, and
would lay the model aside first if it were let (`LAYS_ASIDE`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from refit_api.errors import SpecError
from vllm.distributed.weight_transfer.base import WeightTransferEngine

from refit_runtime.driven import DrivenClient

NEWEST = 0
LAYS_ASIDE = not hasattr(WeightTransferEngine, "start_weight_update")


@dataclass
class RefitInitInfo:
    """Nothing: the rank registered with the group's catalog when its model was loaded."""


@dataclass
class RefitUpdateInfo:
    """`version`: its number, or 0 for the newest that is Ready."""

    update_kind: ClassVar[str] = "dense"  # older workers ask

    version: int = NEWEST

    def __post_init__(self) -> None:
        if type(self.version) is not int or self.version < 0:
            raise SpecError(f"update_info.version {self.version!r}: expected the number of a version, or {NEWEST} for the newest", seen=self.version)


class RefitTransferEngine(WeightTransferEngine[RefitInitInfo, RefitUpdateInfo]):  # type: ignore[misc]  # vLLM has no types here
    """vLLM makes it; the worker gives it the rank."""

    init_info_cls = RefitInitInfo
    update_info_cls = RefitUpdateInfo
    supports_draft_weight_update = False

    client: DrivenClient

    def init_transfer_engine(self, init_info: RefitInitInfo) -> None:
        """The rank is there since the engine started."""

    def start_weight_update(self) -> None:
        """Live parameters are written where they are: nothing is put aside."""

    def receive_weights(self, update_info: RefitUpdateInfo, load_weights: Any = None) -> None:
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()  # what the device still does for the last step reads live parameters
        self.client.update(update_info.version)

    def finish_weight_update(self) -> None:
        """An update that came back is installed and checked."""

    @staticmethod
    def trainer_send_weights(*_: Any, **__: Any) -> None:
        """The trainer's half of older releases, which gathers whole tensors."""
        raise SpecError("trainer_send_weights: back-end refit publishes what TrainerClient.bind was given; call TrainerClient.publish")

    def shutdown(self) -> None:
        """Of a connection to a trainer; leases end with each update, and the rank serves others on until the worker ends."""


def rank_of(engine: Any, client: DrivenClient) -> None:
    """Raises SpecError: another plug-in has taken the name."""
    if not isinstance(engine, RefitTransferEngine):
        raise SpecError(f"weight transfer back-end refit is {type(engine).__module__}.{type(engine).__name__}: another plug-in took the name; remove it")
    engine.client = client
