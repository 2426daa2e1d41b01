"""The plug-in does nothing outside a group; inside, it prepares every engine configuration, and refuses what cannot be refitted."""

from __future__ import annotations

import os
import sys
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from refit_api.errors import EngineMismatch, EngineTooOld, ManagedByOperator, SpecError
from refit_api.mounted import Engine, Group, Model, Mounted, Rollout
from refit_runtime.adapters.vllm import plugin
from refit_runtime.adapters.vllm.endpoint import RefitEndpoint
from refit_runtime.adapters.vllm.settings import allow_plugin
from refit_runtime.adapters.vllm.target import coordinate, place
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader import DummyModelLoader, get_model_loader
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tests.adapters.vllm.models import Rank, directory, engine_config

MOUNTED = Mounted(group=Group(namespace="default", name="demo"), model=Model(name="m"), catalog="127.0.0.1:1", engine=Engine(kv="Keep"))
MANUAL = MOUNTED.model_copy(update={"rollout": Rollout(policy="Manual")})


@pytest.fixture
def arguments(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's EngineArgs, whose method is its own at first, whatever loaded our plug-in in this process before, and is put back afterwards."""
    from vllm.engine.arg_utils import EngineArgs

    method = EngineArgs.create_engine_config
    monkeypatch.setattr(EngineArgs, "create_engine_config", method.__wrapped__ if hasattr(method, plugin._MARK) else method)
    return EngineArgs


@pytest.fixture
def formats(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """vLLM's loaders by format, put back afterwards."""
    from vllm.model_executor import model_loader

    monkeypatch.setattr(model_loader, "_LOAD_FORMAT_TO_MODEL_LOADER", known := dict(model_loader._LOAD_FORMAT_TO_MODEL_LOADER))
    known.pop("refit", None)
    return known


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A pod of a group."""
    file = tmp_path / "settings.json"
    file.write_text(MOUNTED.model_dump_json(by_alias=True))
    for name, value in {"REFIT_SETTINGS": str(file), "POD_NAME": "p", "POD_UID": "u", "POD_NAMESPACE": "default", "POD_IP": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("VLLM_PLUGINS", "refit")
    return file


def test_outside_a_group_engines_are_what_they_would_be(arguments: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REFIT_SETTINGS", "/no/such/file")
    model = directory(tmp_path, "llama")
    before = engine_config(model, Rank(0, 1)).compute_hash()
    plugin.register()
    once = arguments.create_engine_config
    plugin.register()
    assert arguments.create_engine_config is once
    assert engine_config(model, Rank(0, 1)).compute_hash() == before


def test_outside_a_group_our_load_format_is_refused(arguments: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its engine would never get weights."""
    monkeypatch.setenv("REFIT_SETTINGS", "/no/such/file")
    plugin.register()
    with pytest.raises(SpecError, match=r"--load-format refit: this process is in no group.*REFIT_SETTINGS") as refused:
        engine_config(directory(tmp_path, "llama"), Rank(0, 1), load_format="refit")
    assert (refused.value.facts["seen"], refused.value.facts["expected"]) == ("refit", "auto")


def test_outside_a_group_a_process_that_configures_no_engine_loads_nothing(arguments: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers and others have not loaded it when they load plug-ins."""
    monkeypatch.setenv("REFIT_SETTINGS", "/no/such/file")
    monkeypatch.delitem(sys.modules, "vllm.engine.arg_utils")
    plugin.register()
    assert "vllm.engine.arg_utils" not in sys.modules


@pytest.mark.parametrize("given", [MOUNTED, MANUAL], ids=["managed", "driven by a framework"])
def test_an_engine_started_with_the_load_format_is_a_generator(
    arguments: Any, formats: dict[str, Any], group: Path, given: Mounted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tied embeddings too: vLLM looks for them in a checkpoint unless the format is called dummy."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory as Factory

    monkeypatch.setattr(Factory, "_registry", dict(Factory._registry))
    group.write_text(given.model_dump_json(by_alias=True))
    plugin.register()
    parser = arguments.add_cli_args(FlexibleArgumentParser())
    model = directory(tmp_path, "llama, tied")
    read = arguments.from_cli_args(parser.parse_args(["--model", str(model), "--load-format", "refit"]))
    assert read.load_format == "refit"
    (model / "model.safetensors").write_bytes(b"is never opened")
    made, plain = engine_config(model, Rank(0, 1), load_format="refit"), engine_config(model, Rank(0, 1))
    assert (made.load_config.load_format, made.model_config.hf_config.tie_word_embeddings) == ("dummy", True)
    assert made.compute_hash() == plain.compute_hash()
    assert made.parallel_config.worker_cls == (plugin.WORKER if given.rollout.managed else plugin.DRIVEN_WORKER)
    assert type(get_model_loader(LoadConfig(load_format="refit"))) is DummyModelLoader


def test_an_engine_of_another_kind_is_left_to_whoever_loads_it(arguments: Any, group: Path) -> None:
    group.write_text(MOUNTED.model_copy(update={"engine": Engine(kind="Custom")}).model_dump_json(by_alias=True))
    before = arguments.create_engine_config
    plugin.register()
    assert arguments.create_engine_config is before


def test_settings_that_are_wrong_are_named(arguments: Any, group: Path) -> None:
    group.write_text("{}")
    with pytest.raises(SpecError, match="catalog"):
        plugin.register()


def test_an_engine_that_a_framework_drives_gets_the_back_end_and_no_routes(
    arguments: Any, group: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory as Factory

    monkeypatch.setattr(Factory, "_registry", dict(Factory._registry))
    group.write_text(MANUAL.model_dump_json(by_alias=True))
    monkeypatch.delenv("VLLM_PLUGINS")
    plugin.register()
    plugin.register_transfer()
    assert Factory._registry["refit"]().__name__ == "RefitTransferEngine"
    assert "VLLM_PLUGINS" not in os.environ
    config = engine_config(directory(tmp_path, "llama"), Rank(0, 1))
    assert (config.parallel_config.worker_cls, config.weight_transfer_config.backend) == (plugin.DRIVEN_WORKER, "refit")
    app = FastAPI()
    routes = len(app.routes)
    RefitEndpoint().attach_router(app)
    assert (len(app.routes), app.user_middleware) == (routes, [])


@pytest.fixture
def no_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As before 0.32: outputs do not carry a version."""
    from vllm.v1.engine.core import EngineCore

    monkeypatch.delattr(EngineCore, "set_weight_version")


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        (MOUNTED, r"no weight version labels: use 0\.32 or newer"),
        (MANUAL.model_copy(update={"engine": Engine(kv="Salt")}), r"the salt of engine\.kv Salt \(Reset and Keep need none\): use 0\.32 or newer"),
    ],
    ids=["managed", "driven, with the version as salt"],
)
def test_without_labels_what_needs_them_is_refused(arguments: Any, group: Path, no_labels: None, given: Mounted, missing: str) -> None:
    group.write_text(given.model_dump_json(by_alias=True))
    with pytest.raises(EngineTooOld, match=missing):
        plugin.register()


def test_a_framework_can_drive_an_engine_without_labels(arguments: Any, group: Path, no_labels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory as Factory

    monkeypatch.setattr(Factory, "_registry", dict(Factory._registry))
    group.write_text(MANUAL.model_dump_json(by_alias=True))
    before = arguments.create_engine_config
    plugin.register()
    assert arguments.create_engine_config is not before


def test_a_vllm_without_the_calls_that_a_framework_makes_is_too_old(arguments: Any, group: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.engine.protocol import EngineClient

    group.write_text(MANUAL.model_dump_json(by_alias=True))
    monkeypatch.delattr(EngineClient, "start_weight_update")
    with pytest.raises(EngineTooOld, match=r"weight transfer in updates that are started and finished: use 0\.23 or newer"):
        plugin.register()


@pytest.mark.parametrize(
    ("managed", "backend", "outcome"),
    [
        (True, None, None),
        (True, "refit", ManagedByOperator),
        (True, "nccl", ManagedByOperator),
        (False, None, "refit"),
        (False, "refit", "refit"),
        (False, "nccl", EngineMismatch),
    ],
)
def test_one_alone_brings_weights_into_an_engine(managed: bool, backend: str | None, outcome: Any) -> None:
    theirs = SimpleNamespace(weight_transfer_config=SimpleNamespace(backend=backend) if backend else None)
    if isinstance(outcome, type):
        with pytest.raises(outcome, match=f"--weight-transfer-config {backend}"):
            plugin.take_transfer(theirs, managed)
        return
    plugin.take_transfer(theirs, managed)
    assert getattr(theirs.weight_transfer_config, "backend", None) == outcome


@pytest.mark.parametrize(("theirs", "expected"), [(None, {"refit"}), ("mine,refit", {"mine", "refit"})], ids=["no list", "a list of their own"])
def test_vllm_mounts_our_routes_and_loads_whatever_it_would_load(theirs: str | None, expected: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", theirs or "")
    if theirs is None:
        monkeypatch.delenv("VLLM_PLUGINS")
    discovered = {entry.name for entry in entry_points(group="vllm.general_plugins")}
    allow_plugin("refit")
    assert set(os.environ["VLLM_PLUGINS"].split(",")) == expected | (discovered if theirs is None else set())


def test_inside_a_group_every_engine_gets_our_worker_once(arguments: Any, group: Path, tmp_path: Path) -> None:
    plugin.register()
    first = arguments.create_engine_config
    plugin.register()
    assert arguments.create_engine_config is first
    config = engine_config(directory(tmp_path, "llama"), Rank(1, 2))
    assert config.parallel_config.worker_cls == plugin.WORKER
    assert (coordinate(config, 1), place(config, 1)) == ("tp1", (1, 2))


def config(**changes: Any) -> Any:
    parallel = {"worker_cls": "vllm.v1.worker.gpu_worker.Worker", "enable_eplb": False}
    model = {"model": "m", "enable_sleep_mode": False}
    for name, value in changes.items():
        (parallel if name in parallel else model)[name] = value
    return SimpleNamespace(parallel_config=SimpleNamespace(**parallel), model_config=SimpleNamespace(**model))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"enable_sleep_mode": True}, "--enable-sleep-mode"),
        ({"enable_eplb": True}, "--enable-eplb"),
        ({"worker_cls": "their.Worker"}, "--worker-cls their.Worker"),
    ],
)
def test_what_moves_weights_away_is_refused_by_the_argument_s_name(changes: dict[str, Any], named: str) -> None:
    plugin.refuse(config())
    with pytest.raises(EngineMismatch, match=named):
        plugin.refuse(config(**changes))


@pytest.mark.parametrize("method", ["mtp", "eagle3", "draft_model", "medusa"])
def test_speculation_with_weights_of_its_own_is_refused(method: str) -> None:
    """Draft models and multi-token heads would go on with the weights that they started with, and nobody would see it."""
    guessing = config()
    guessing.speculative_config = SimpleNamespace(method=method)
    with pytest.raises(EngineMismatch, match=f"--speculative-config with method {method}"):
        plugin.refuse(guessing)


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_speculation_without_weights_is_no_reason_to_refuse(method: str) -> None:
    guessing = config()
    guessing.speculative_config = SimpleNamespace(method=method)
    plugin.refuse(guessing)


@pytest.mark.parametrize(
    ("rank", "tensor", "pipeline", "data", "experts", "expected"),
    [
        (0, 1, 1, 1, False, "tp0"),
        (3, 2, 2, 1, False, "tp1-pp1"),
        (1, 2, 1, 4, False, "tp1"),
        (1, 2, 1, 4, True, "tp1-dp3"),
    ],
    ids=["alone", "pipeline stages", "dense replicas are alike", "experts are cut over cores"],
)
def test_coordinates(rank: int, tensor: int, pipeline: int, data: int, experts: bool, expected: str) -> None:
    parallel = SimpleNamespace(tensor_parallel_size=tensor, pipeline_parallel_size=pipeline, data_parallel_size=data, data_parallel_index=3)
    assert coordinate(SimpleNamespace(parallel_config=parallel, model_config=SimpleNamespace(is_moe=experts)), rank) == expected
