"""`vllm.general_plugins`: what makes a stock vLLM a generator, without a change to the user's arguments.

vLLM calls `register` in every process, more than once. Outside a group (no settings mounted) it does nothing. Inside, every engine configuration
gets our worker class, and what cannot be refitted is refused before anything starts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from refit_api.errors import EngineMismatch, EngineTooOld

from refit_runtime import last_words
from refit_runtime.adapters.vllm.settings import allow_plugin
from refit_runtime.adapters.vllm.target import note_ranks
from refit_runtime.settings import RuntimeSettings

NAME = "refit"
WORKER = "refit_runtime.adapters.vllm.worker.RefitWorker"
KNOWN_WORKERS = ("vllm.v1.worker.cpu_worker.CPUWorker", "vllm.v1.worker.gpu_worker.Worker", WORKER)
MANAGED_SINCE = "0.32"
_MARK = "__refit__"


@last_words.fatal()
def register() -> None:
    """Idempotent. Raises SpecError for settings that are mounted and wrong, EngineMismatch, EngineTooOld."""
    if not RuntimeSettings.mounted():
        return
    settings = RuntimeSettings.load()
    from vllm.engine.arg_utils import EngineArgs

    if hasattr(EngineArgs.create_engine_config, _MARK):
        return
    if not settings.rollout.managed:
        raise EngineMismatch(
            "spec.rollout.policy: Manual is not carried out by this release; use Latest or Pinned",
            seen=settings.rollout.policy,
            expected="Latest, Pinned",
        )
    _require_managed()
    allow_plugin(NAME)
    if settings.engine.kv == "Salt":
        from refit_runtime.adapters.vllm.salt import salt_requests

        salt_requests()
    EngineArgs.create_engine_config = _refitted(EngineArgs.create_engine_config)


def _refitted(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    @last_words.fatal()
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = original(self, *args, **kwargs)
        refuse(config)
        config.parallel_config.worker_cls = WORKER
        note_ranks(config)
        return config

    setattr(create_engine_config, _MARK, True)
    return create_engine_config


def refuse(config: Any) -> None:
    """Raises EngineMismatch that names the argument: live parameters would move, go away or be of another kind."""
    worker = config.parallel_config.worker_cls
    offload = getattr(config, "offload_config", None)
    wrong = {
        "--enable-sleep-mode": config.model_config.enable_sleep_mode,
        "--enable-eplb": config.parallel_config.enable_eplb,
        "--cpu-offload-gb": offload is not None and offload.uva.cpu_offload_gb > 0,
        "--offload-group-size": offload is not None and offload.prefetch.offload_group_size > 0,
        f"--worker-cls {worker}": worker not in KNOWN_WORKERS,
    }
    found = [argument for argument, present in wrong.items() if present]
    if found:
        raise EngineMismatch(
            f"engine of model {config.model_config.model}: {', '.join(found)} cannot be used in a generator, since weights are put into live parameters "
            "where they are; remove it from the engine's arguments",
            seen=", ".join(found),
        )


def _require_managed() -> None:
    """Raises EngineTooOld: the operator's orders need endpoint plug-ins and labels."""
    import vllm
    from vllm.v1.engine.core import EngineCore

    missing = [
        name for name, there in {"weight version labels": hasattr(EngineCore, "set_weight_version"), "endpoint plug-ins": _has_endpoints()}.items() if not there
    ]
    if missing:
        raise EngineTooOld(
            f"vLLM {vllm.__version__} has no {' and no '.join(missing)}: use {MANAGED_SINCE} or newer",
            seen=vllm.__version__,
            expected=MANAGED_SINCE,
        )


def _has_endpoints() -> bool:
    from importlib.util import find_spec

    return find_spec("vllm.plugins.endpoint_plugins") is not None
