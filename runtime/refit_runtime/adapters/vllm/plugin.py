"""`vllm.general_plugins`: what makes a stock vLLM a generator, without a change to the user's arguments.

vLLM calls `register` in every process, more than once. Outside a group (no settings mounted) it imports nothing, and refuses `--load-format refit`, whose
engine would never get weights; where engines are `Custom` it does nothing: there a framework loads what it got. Else every engine configuration gets our
worker class, and what cannot be refitted is refused before anything starts. In a managed group the pod's agent drives the engine; with policy Manual a
framework does, through vLLM's weight-transfer API, whose back-end is then `refit`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from refit_api.errors import EngineMismatch, EngineTooOld, ManagedByOperator, SpecError

from refit_runtime import last_words
from refit_runtime.adapters.vllm.settings import allow_plugin
from refit_runtime.adapters.vllm.target import note_ranks
from refit_runtime.settings import RuntimeSettings

NAME = "refit"
WORKER = "refit_runtime.adapters.vllm.worker.RefitWorker"
DRIVEN_WORKER = "refit_runtime.adapters.vllm.driven.DrivenWorker"
KNOWN_WORKERS = ("vllm.v1.worker.cpu_worker.CPUWorker", "vllm.v1.worker.gpu_worker.Worker", WORKER, DRIVEN_WORKER)
MANAGED_SINCE, DRIVEN_SINCE = "0.32", "0.23"
WITHOUT_WEIGHTS = ("ngram", "ngram_gpu", "suffix")  # of speculative decoding: other methods have draft models or heads, which would stay as they were
_MARK = "__refit__"


@last_words.fatal()
def register() -> None:
    """Idempotent. Raises SpecError for settings that are mounted and wrong, EngineMismatch, EngineTooOld."""
    if not RuntimeSettings.mounted():
        if (arguments := sys.modules.get("vllm.engine.arg_utils")) is not None:  # else nothing is configured in this process
            refuse_outside(arguments.EngineArgs)
        return
    settings = RuntimeSettings.load()
    if settings.engine.kind != "vLLM":
        return
    from vllm.engine.arg_utils import EngineArgs

    if hasattr(EngineArgs.create_engine_config, _MARK):
        return
    if settings.rollout.managed:
        _require(MANAGED_SINCE, {"weight version labels": _has_labels(), "endpoint plug-ins": _has_endpoints()})
        allow_plugin(NAME)
    else:
        _require(DRIVEN_SINCE, {"weight transfer in updates that are started and finished": has_transfer()})
        register_transfer()
    register_format()
    if settings.engine.kv == "Salt":
        _require(MANAGED_SINCE, {"weight version labels, which are the salt of engine.kv Salt (Reset and Keep need none)": _has_labels()})
        from refit_runtime.adapters.vllm.salt import salt_requests

        salt_requests()
    EngineArgs.create_engine_config = _refitted(EngineArgs.create_engine_config, settings.rollout.managed)


def _refitted(original: Callable[..., Any], managed: bool) -> Callable[..., Any]:
    @functools.wraps(original)
    @last_words.fatal()
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        if asks_for_us(self):
            self.load_format = "dummy"  # vLLM asks for that name elsewhere, too: a checkpoint that is not read may not untie embeddings
        config = original(self, *args, **kwargs)
        refuse(config)
        take_transfer(config, managed)
        config.parallel_config.worker_cls = WORKER if managed else DRIVEN_WORKER
        note_ranks(config)
        return config

    setattr(create_engine_config, _MARK, True)
    return create_engine_config


def asks_for_us(arguments: Any) -> bool:
    """`--load-format refit`: by which launchers that tell engines apart by their load format, as Dynamo does, name a generator."""
    return bool(arguments.load_format.lower() == NAME)


def register_format() -> None:
    """Idempotent. For engines that are configured by other hands than `EngineArgs`; first weights are nobody's."""
    from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER, DummyModelLoader, register_model_loader

    if NAME not in _LOAD_FORMAT_TO_MODEL_LOADER:
        register_model_loader(NAME)(DummyModelLoader)


def refuse_outside(arguments: Any) -> None:
    """Idempotent."""
    original = arguments.create_engine_config
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    @last_words.fatal()
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        if asks_for_us(self):
            raise SpecError(
                f"--load-format {NAME}: this process is in no group, so no weights would ever come. Mount the ConfigMap <group>-refit, name its file in "
                "REFIT_SETTINGS if it lies elsewhere, or start the engine with --load-format auto",
                seen=NAME,
                expected="auto",
            )
        return original(self, *args, **kwargs)

    setattr(create_engine_config, _MARK, True)
    arguments.create_engine_config = create_engine_config


def refuse(config: Any) -> None:
    """Raises EngineMismatch that names the argument: live parameters would move, go away or be of another kind."""
    worker = config.parallel_config.worker_cls
    offload, guesses = getattr(config, "offload_config", None), getattr(config, "speculative_config", None)
    wrong = {
        "--enable-sleep-mode": config.model_config.enable_sleep_mode,
        "--enable-eplb": config.parallel_config.enable_eplb,
        "--cpu-offload-gb": offload is not None and offload.uva.cpu_offload_gb > 0,
        "--offload-group-size": offload is not None and offload.prefetch.offload_group_size > 0,
        f"--worker-cls {worker}": worker not in KNOWN_WORKERS,
        f"--speculative-config with method {getattr(guesses, 'method', None)}": guesses is not None and guesses.method not in WITHOUT_WEIGHTS,
    }
    found = [argument for argument, present in wrong.items() if present]
    if found:
        raise EngineMismatch(
            f"engine of model {config.model_config.model}: {', '.join(found)} cannot be used in a generator, since weights are put into live parameters "
            "where they are; remove it from the engine's arguments",
            seen=", ".join(found),
        )


def take_transfer(config: Any, managed: bool) -> None:
    """Who brings weights into the engine. Raises ManagedByOperator, EngineMismatch."""
    theirs = getattr(config, "weight_transfer_config", None)
    if theirs is None and not managed:
        from vllm.config import WeightTransferConfig

        config.weight_transfer_config = WeightTransferConfig(backend=NAME)
    elif theirs is not None and managed:
        raise ManagedByOperator(
            f"--weight-transfer-config {theirs.backend}: the operator drives the generators of this group; "
            "remove the argument, or set spec.rollout.policy Manual",
            seen=theirs.backend,
        )
    elif theirs is not None and theirs.backend != NAME:
        raise EngineMismatch(
            f"--weight-transfer-config {theirs.backend}: weights of this group come through the back-end {NAME}; name it, or leave the argument out",
            seen=theirs.backend,
            expected=NAME,
        )


def register_transfer() -> None:
    """Idempotent; nothing is imported before an engine asks for it."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    if NAME not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(NAME, "refit_runtime.adapters.vllm.transfer", "RefitTransferEngine")


def _require(since: str, features: dict[str, bool]) -> None:
    """Raises EngineTooOld that lists what is not there; `since` is for the reader, nothing is decided by it."""
    import vllm

    missing = [name for name, there in features.items() if not there]
    if missing:
        raise EngineTooOld(f"vLLM {vllm.__version__} has no {' and no '.join(missing)}: use {since} or newer", seen=vllm.__version__, expected=since)


def _has_labels() -> bool:
    from vllm.v1.engine.core import EngineCore

    return hasattr(EngineCore, "set_weight_version")


def _has_endpoints() -> bool:
    from importlib.util import find_spec

    return find_spec("vllm.plugins.endpoint_plugins") is not None


def has_transfer() -> bool:
    from vllm.engine.protocol import EngineClient

    return hasattr(EngineClient, "start_weight_update")
