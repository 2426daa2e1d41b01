"""The trainer's half of vLLM's weight-transfer API: `send_weights` publishes, and tells the engines which version to take.

What is published is what the `TrainerClient` was bound to: each rank's own part, read where it lies. A `WeightSource` of vLLM's gathers whole tensors on
every rank first, so it is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import structlog
from refit_api.errors import SpecError
from vllm.distributed.weight_transfer import TrainerWeightTransferEngine, WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.base import TrainerInitInfo

from refit_runtime.trainer import TrainerClient

log = structlog.get_logger(__name__)


@dataclass
class RefitTrainerInitInfo(TrainerInitInfo):  # type: ignore[misc]  # vLLM has no types here
    """`trainer`: this rank's client, bound to its weights. `step`: that of the first `send_weights`; after a restart too, since a restart is a new run."""

    backend: ClassVar[str] = "refit"

    trainer: TrainerClient
    step: int = 0


class RefitTrainerEngine(TrainerWeightTransferEngine[RefitTrainerInitInfo]):  # type: ignore[misc]
    """Every trainer rank has one; the first rank's speaks to the engines."""

    init_info_cls = RefitTrainerInitInfo

    def __init__(self, info: RefitTrainerInitInfo, client: Any) -> None:
        super().__init__(client=client, is_sender=info.is_sender)
        self._trainer, self._step = info.trainer, info.step

    @classmethod
    def trainer_init(cls, init_info: RefitTrainerInitInfo, *, client: Any, source: Any = None) -> RefitTrainerEngine:
        if source is not None:
            raise SpecError(
                "source: back-end refit publishes what TrainerClient.bind was given, each rank its own part; bind the module there and pass no source",
                seen=type(source).__name__,
            )
        if init_info.is_sender:
            client.init_weight_transfer_engine({})
        return cls(init_info, client)

    def send_weights(self) -> None:
        """One version, on every rank. Training may go on when it returns; engines pause and resume as the framework says."""
        version = self._trainer.publish(self._step)
        self._step += 1
        if version is None:
            log.info("this step was skipped: the engines still read the version before (trainer.onBusy Skip)", step=self._step - 1)
        elif self.is_sender:
            self.client.start_weight_update()
            self.client.update_weights({"version": version.number})
            self.client.finish_weight_update(str(version.number))


if RefitTrainerInitInfo.backend not in WeightTransferTrainerFactory._registry:  # a trainer loads no plug-ins: who has the init info has the engine
    WeightTransferTrainerFactory.register_engine(RefitTrainerInitInfo.backend, RefitTrainerEngine)
