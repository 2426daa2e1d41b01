"""The worker of an engine that a framework drives (policy Manual): vLLM's weight-transfer calls reach its rank, and a fenced rank runs no step.

vLLM's executor stops reading replies at the first rank that raises, and hands the rest to whoever calls next. Ranks fail all alike here (`DrivenClient`),
so only the last one that it reads says so.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import structlog
from refit_api.errors import EngineHung, SpecError
from torch import distributed

from refit_runtime.adapters.vllm.transfer import LAYS_ASIDE, rank_of
from refit_runtime.adapters.vllm.worker import BoundWorker
from refit_runtime.driven import DrivenClient
from refit_runtime.settings import RuntimeSettings
from refit_runtime.wiring import seams_of

log = structlog.get_logger(__name__)

T = TypeVar("T")


class GlooBallot:
    """A group of its own, on the CPU: a late rank breaks nothing of the engine's. In it is who must act together: a core, or all that share experts."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._group: Any = None

    def open(self) -> None:
        """Once the engine's process group is there; by all ranks."""
        self._group = distributed.new_group(backend="gloo", timeout=timedelta(seconds=self._seconds))

    def gather(self, mine: T) -> tuple[T, ...]:
        if distributed.get_world_size(self._group) == 1:  # two collectives saved for each question
            return (mine,)
        outcomes: list[Any] = [None] * distributed.get_world_size(self._group)
        try:
            distributed.all_gather_object(outcomes, mine, group=self._group)
        except RuntimeError as error:
            raise EngineHung(f"a rank of this engine was not heard in {self._seconds:g} s, or is gone: restart the engine") from error
        return tuple(outcomes)


class DrivenWorker(BoundWorker):
    """The calls are those of vLLM's own worker, and one that it does not have: `refit_stage`, through `collective_rpc`."""

    refit: DrivenClient

    def refit_made(self, settings: RuntimeSettings, rank: int, world: int) -> DrivenClient:
        self._ballot = GlooBallot(settings.rollout.progress_deadline_seconds + settings.engine.pause_timeout_seconds)  # a stage, and all that follows
        return DrivenClient(settings, self.refit_coordinate, seams_of(settings, rank), self._ballot, rank, world)

    def init_device(self) -> None:
        super().init_device()
        self._ballot.open()

    def load_model(self, **kwargs: Any) -> None:
        super().load_model(**kwargs)
        rank_of(self.weight_transfer_engine, self.refit)

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        self.refit.require()
        return super().execute_model(*args, **kwargs)

    def refit_stage(self, version: int) -> None:
        """Begins beside the requests and returns; an `update_weights` that follows goes on from what is verified by then."""
        self.refit.begin(version)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._said_once(partial(super().init_weight_transfer_engine, init_info))

    def start_weight_update(self, is_checkpoint_format: bool = True) -> None:
        """Older callers say how weights will come; ours are installed where they are."""
        self._said_once(partial(super().start_weight_update, **({"is_checkpoint_format": False} if LAYS_ASIDE else {})))

    def start_draft_weight_update(self) -> None:
        self._said_once(super().start_draft_weight_update)

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        self._said_once(partial(self._update, update_info))

    def _update(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        if isinstance(update_info, list):
            raise SpecError("update_info: expected one object for all ranks, since all take the same version", seen="a list")
        super().update_weights(update_info)

    def finish_weight_update(self) -> None:
        self._said_once(super().finish_weight_update)

    def _said_once(self, call: Callable[[], None]) -> None:
        parallel = self.vllm_config.parallel_config
        try:
            call()
        except Exception as error:
            if self.rank == parallel.world_size - 1 or parallel.distributed_executor_backend == "external_launcher":
                raise
            log.warning("told by the last rank", error=str(error))
