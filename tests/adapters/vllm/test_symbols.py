"""Everything of vLLM that the adapter names: releases rename and move things, and this says which, before an engine fails in the middle of its start.

It runs against the vLLM that is installed. What only newer releases have is in `LABELLED`; without it the plug-in refuses what needs it.
"""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

import pytest

# module, name in it, parameters that are passed by name
EVERYWHERE: list[tuple[str, str, tuple[str, ...]]] = [
    ("vllm.engine.arg_utils", "EngineArgs.create_engine_config", ()),
    ("vllm.engine.protocol", "EngineClient.start_weight_update", ()),
    ("vllm.config", "WeightTransferConfig", ("backend",)),
    ("vllm.config", "get_current_vllm_config", ()),
    ("vllm.config", "set_current_vllm_config", ()),
    ("vllm.distributed.weight_transfer", "WeightTransferEngineFactory._registry", ()),
    ("vllm.distributed.weight_transfer", "WeightTransferEngineFactory.register_engine", ()),
    ("vllm.distributed.weight_transfer.base", "WeightTransferEngine.init_transfer_engine", ()),
    ("vllm.distributed.weight_transfer.base", "WeightTransferEngine.receive_weights", ()),
    ("vllm.distributed.weight_transfer.base", "WeightTransferEngine.parse_update_info", ()),
    ("vllm.distributed.weight_transfer.base", "WeightTransferEngine.shutdown", ()),
    ("vllm.platforms", "current_platform.device_type", ()),
    ("vllm.platforms", "current_platform.is_cpu", ()),
    ("vllm.v1.worker.worker_base", "WorkerBase.init_device", ()),
    ("vllm.v1.worker.worker_base", "WorkerBase.load_model", ("load_dummy_weights",)),
    ("vllm.v1.worker.worker_base", "WorkerBase.execute_model", ()),
    ("vllm.v1.worker.worker_base", "WorkerBase.get_model", ()),
    ("vllm.v1.worker.worker_base", "WorkerBase.shutdown", ()),
    ("vllm.v1.worker.gpu_worker", "Worker.init_weight_transfer_engine", ("init_info",)),
    ("vllm.v1.worker.gpu_worker", "Worker.start_weight_update", ()),
    ("vllm.v1.worker.gpu_worker", "Worker.update_weights", ("update_info",)),
    ("vllm.v1.worker.gpu_worker", "Worker.finish_weight_update", ()),
    ("vllm.v1.worker.cpu_worker", "CPUWorker", ()),
    ("vllm.model_executor.model_loader.base_loader", "initialize_model", ("model_config",)),
    ("vllm.model_executor.model_loader.base_loader", "process_weights_after_loading", ("model_config", "target_device")),
    ("vllm.model_executor.model_loader", "_LOAD_FORMAT_TO_MODEL_LOADER", ()),
    ("vllm.model_executor.model_loader", "register_model_loader", ()),
    ("vllm.model_executor.model_loader", "DummyModelLoader", ()),
    ("vllm.model_executor.layers.quantization.base_config", "QuantizeMethodBase.process_weights_after_loading", ()),
    ("vllm.model_executor.layers.attention", "MLAAttention.process_weights_after_loading", ()),
    ("vllm.model_executor.layers.utils", "dispatch_cpu_unquantized_gemm", ("layer", "remove_weight")),
    ("vllm.utils.torch_utils", "set_default_torch_dtype", ()),
    ("vllm.v1.engine.core_client", "AsyncMPClient.pause_scheduler_async", ("mode", "clear_cache")),
    ("vllm.v1.engine.core_client", "AsyncMPClient.resume_scheduler_async", ()),
    ("vllm.v1.engine.core_client", "AsyncMPClient.collective_rpc_async", ()),
    ("vllm.v1.request", "Request.update_block_hashes", ()),
]
LABELLED: list[tuple[str, str, tuple[str, ...]]] = [
    ("vllm.v1.engine.core", "EngineCore.set_weight_version", ("weight_version",)),
    ("vllm.v1.engine.core", "EngineCore.preprocess_add_request", ()),
    ("vllm.v1.engine.core_client", "AsyncMPClient.call_utility_all_async", ()),
    ("vllm.plugins.endpoint_plugins", "", ()),
    ("vllm.distributed.weight_transfer", "TrainerWeightTransferEngine", ()),
    ("vllm.distributed.weight_transfer", "WeightTransferTrainerFactory._registry", ()),
]


def found(module: str, name: str) -> Any:
    there: Any = import_module(module)
    for part in filter(None, name.split(".")):
        there = getattr(there, part)
    return there


def names(rows: list[tuple[str, str, tuple[str, ...]]]) -> list[str]:
    return [f"{module}.{name}" for module, name, _ in rows]


@pytest.mark.parametrize(("module", "name", "parameters"), EVERYWHERE, ids=names(EVERYWHERE))
def test_what_every_release_that_we_serve_has(module: str, name: str, parameters: tuple[str, ...]) -> None:
    there = found(module, name)
    assert set(parameters) <= set(inspect.signature(there).parameters if parameters else ())


@pytest.mark.parametrize(("module", "name", "parameters"), LABELLED, ids=names(LABELLED))
def test_what_managed_groups_need_too(module: str, name: str, parameters: tuple[str, ...]) -> None:
    there = found(module, name)
    assert set(parameters) <= set(inspect.signature(there).parameters if parameters else ())


def test_the_attributes_of_a_configuration_that_are_read() -> None:
    from vllm.config import ModelConfig, OffloadConfig, ParallelConfig, VllmConfig

    parallel = {"worker_cls", "enable_eplb", "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "data_parallel_index", "world_size"}
    read: dict[Any, set[str]] = {
        ParallelConfig: {*parallel, "prefill_context_parallel_size", "distributed_executor_backend"},
        ModelConfig: {"enable_sleep_mode", "model", "dtype", "hf_config"},
        VllmConfig: {"parallel_config", "model_config", "weight_transfer_config", "additional_config", "offload_config", "load_config"},
    }
    for config, attributes in read.items():
        assert attributes <= {*vars(config), *config.__dataclass_fields__}, config
    offload = OffloadConfig()
    assert (offload.uva.cpu_offload_gb, offload.prefetch.offload_group_size) == (0, 0)
