"""The engine's worker process as a generator rank: vLLM's own worker, with a rank of ours made before its process group and bound after its model.

A subclass rather than a worker extension: an extension comes last in the method order, so it cannot be there first, and a framework may need its own.
`RefitWorker` is the one of a managed group. Its methods named `refit_*` are called by the driver through `collective_rpc`. None raises for what an
engine may meet, and none waits: an exception or a long call would hold up the engine core and the executor's other ranks.
"""

from __future__ import annotations

import threading
from importlib import import_module
from typing import Any

import structlog
from refit_api.errors import EngineMismatch, RefitError
from vllm.platforms import current_platform

from refit_runtime import last_words
from refit_runtime.adapters.vllm.loading import keep_plain_linears, observed
from refit_runtime.adapters.vllm.messages import unpack_order
from refit_runtime.adapters.vllm.pod import Pod
from refit_runtime.adapters.vllm.reporter import Reporter
from refit_runtime.adapters.vllm.target import VllmTarget, coordinate, place
from refit_runtime.ports import CommitOrder, StageOrder
from refit_runtime.rank import GeneratorRank
from refit_runtime.settings import RuntimeSettings
from refit_runtime.wiring import seams_of

log = structlog.get_logger(__name__)

WORKERS = {"cpu": ("vllm.v1.worker.cpu_worker", "CPUWorker"), "cuda": ("vllm.v1.worker.gpu_worker", "Worker")}


def _worker() -> Any:
    device = current_platform.device_type
    if device not in WORKERS:
        raise EngineMismatch(f"vLLM runs on {device}: generators are supported on {', '.join(WORKERS)}", seen=device, expected=", ".join(WORKERS))
    module, name = WORKERS[device]
    return getattr(import_module(module), name)


_Worker: Any = _worker()


class BoundWorker(_Worker):  # type: ignore[misc]  # chosen at run time
    """`refit` is there from `init_device` on."""

    refit: Any

    def refit_made(self, settings: RuntimeSettings, rank: int, world: int) -> Any:
        """What is bound to the model and closed at the end."""
        raise NotImplementedError

    @last_words.fatal()
    def init_device(self) -> None:
        settings = RuntimeSettings.load()
        self.refit_coordinate = coordinate(self.vllm_config, self.rank)
        self.refit = self.refit_made(settings, *place(self.vllm_config, self.rank))
        super().init_device()

    @last_words.fatal()
    def load_model(self, **kwargs: Any) -> None:
        """The arena is allocated with it, before the engine measures how much memory is left for its cache."""
        if current_platform.is_cpu():
            keep_plain_linears()
        with observed() as models:
            super().load_model(**kwargs)
        loaded = next((model for model in models if model.module is self.get_model()), None)
        if loaded is None:
            raise EngineMismatch(
                f"model {self.model_config.model}: load format {self.load_config.load_format} does not load as others do, so its needs could not be recorded; "
                "use --load-format dummy",
                seen=self.load_config.load_format,
                expected="dummy",
            )
        loaded.require()
        self.refit.bind(VllmTarget(self.refit_coordinate, loaded))

    def shutdown(self) -> None:
        if hasattr(self, "refit"):  # not if the device could not be initialised
            self.refit.close()
        super().shutdown()


class RefitWorker(BoundWorker):
    """The pod's agent commands it."""

    refit: GeneratorRank

    def refit_made(self, settings: RuntimeSettings, rank: int, world: int) -> GeneratorRank:
        news = threading.Event()
        made = GeneratorRank(settings, seams_of(settings, rank), self.refit_coordinate, rank, world, changed=news.set)
        self.refit_reporter = Reporter(made, rank, Pod(settings.pod.uid), news)
        return made

    def load_model(self, **kwargs: Any) -> None:
        super().load_model(**kwargs)
        self.refit_reporter.start()

    def refit_report(self) -> bytes:
        return self.refit_reporter.now()

    def refit_stage(self, order: bytes) -> bytes:
        self.refit.start(unpack_order(StageOrder, order))
        return self.refit_report()

    def refit_prepare(self, order: bytes) -> bytes:
        self.refit.prepare(unpack_order(CommitOrder, order))
        return self.refit_report()

    def refit_install(self, order: bytes) -> bytes:
        self.refit.install(unpack_order(CommitOrder, order))
        return self.refit_report()

    def refit_discard(self) -> bytes:
        self.refit.discard()
        return self.refit_report()

    def refit_release(self, number: int) -> bytes:
        """Begins; readers may take a while."""
        threading.Thread(target=self._refit_release, args=(number,), name="refit-release", daemon=True).start()
        return self.refit_report()

    def _refit_release(self, number: int) -> None:
        try:
            self.refit.release(number)
        except RefitError as error:
            log.warning("holding not released", version=number, error=error.message, facts=error.facts)

    def refit_held(self) -> list[int]:
        """Versions that are whole here or still read by others."""
        return list(self.refit.held())

    def refit_fence(self, reason: str) -> bytes:
        self.refit.fence(reason)
        return self.refit_report()

    def shutdown(self) -> None:
        if hasattr(self, "refit_reporter"):
            self.refit_reporter.close()
        super().shutdown()
