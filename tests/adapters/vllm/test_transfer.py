"""The two halves of vLLM's weight-transfer API: an update names a version and nothing else, and ranks that fail together say so once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from refit_api.errors import MixedRanks, SpecError


def engine() -> Any:
    from refit_runtime.adapters.vllm.transfer import RefitTransferEngine
    from vllm.config import WeightTransferConfig

    config: Any = SimpleNamespace(parallel_config=None, model_config=None)
    return RefitTransferEngine(WeightTransferConfig(backend="refit"), config, torch.device("cpu"), torch.nn.Linear(1, 1))


@pytest.mark.parametrize(("given", "version"), [({}, 0), ({"version": 0}, 0), ({"version": 7}, 7)], ids=["nothing", "the newest", "by number"])
def test_an_update_names_a_version(given: dict[str, Any], version: int) -> None:
    asked: list[int] = []
    one = engine()
    one.client = SimpleNamespace(update=asked.append)
    one.init_transfer_engine(one.parse_init_info({}))
    one.start_weight_update()
    one.receive_weights(one.parse_update_info(given))
    one.finish_weight_update()
    assert asked == [version]


def test_workers_of_before_0_32_find_what_they_ask_for() -> None:
    """They read the kind of an update, hand over a function that loads weights, and need a trainer's half to make the back-end at all."""
    asked: list[int] = []
    one = engine()
    one.client = SimpleNamespace(update=asked.append)
    update = one.parse_update_info({"version": 7})
    assert update.update_kind == "dense"
    one.receive_weights(update, load_weights=lambda weights: pytest.fail("nothing is loaded"))
    assert asked == [7]
    with pytest.raises(SpecError, match=r"TrainerClient\.publish"):
        one.trainer_send_weights(iter([]), {})


@pytest.mark.parametrize("asked", [{}, {"is_checkpoint_format": True}, {"is_checkpoint_format": False}], ids=str)
def test_no_worker_lays_its_model_aside(asked: dict[str, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """Before 0.32 the worker does so unless it is told that weights come in its own layout, whatever the framework said."""
    from refit_runtime.adapters.vllm import driven

    seen: list[dict[str, bool]] = []
    monkeypatch.setattr(driven.DrivenWorker.__mro__[2], "start_weight_update", lambda worker, **given: seen.append(given))
    worker: Any = object.__new__(driven.DrivenWorker)
    worker.vllm_config = SimpleNamespace(parallel_config=None)
    for older in (False, True):
        monkeypatch.setattr(driven, "LAYS_ASIDE", older)
        worker.start_weight_update(**asked)
    assert seen == [{}, {"is_checkpoint_format": False}]


@pytest.mark.parametrize("given", [{"version": "7"}, {"version": -1}, {"version": True}, {"version": None}], ids=str)
def test_what_is_no_version_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=r"update_info\.version"):
        engine().parse_update_info(given)


def test_nothing_else_passes_through_the_api() -> None:
    for parse, name in ((engine().parse_init_info, "init_info"), (engine().parse_update_info, "update_info")):
        with pytest.raises(ValueError, match=f"Invalid {name} .*master_address"):
            parse({"master_address": "10.0.0.1"})


def test_a_back_end_of_another_plug_in_is_not_taken_for_ours() -> None:
    from refit_runtime.adapters.vllm.transfer import rank_of

    client: Any = object()
    one = engine()
    rank_of(one, client)
    assert one.client is client
    with pytest.raises(SpecError, match="another plug-in took the name"):
        rank_of(object(), client)


@pytest.mark.parametrize(
    ("rank", "executor", "said"),
    [(0, "mp", False), (1, "mp", True), (0, "external_launcher", True)],
    ids=["the last one will", "the last one", "nobody else answers this caller"],
)
def test_ranks_that_fail_together_say_so_once(rank: int, executor: str, said: bool) -> None:
    """The executor stops reading at the first failure: a second one would be taken for the answer to the next call."""
    from refit_runtime.adapters.vllm.driven import DrivenWorker

    worker: Any = object.__new__(DrivenWorker)
    worker.rank = rank
    worker.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(world_size=2, distributed_executor_backend=executor))
    for given, kind in ((RuntimeError("start_weight_update must be called before"), RuntimeError), (MixedRanks("a rank"), MixedRanks)):

        def call(error: Exception = given) -> None:
            raise error

        if said:
            with pytest.raises(kind):
                worker._said_once(call)
        else:
            worker._said_once(call)


def test_ranks_are_not_sent_to_different_versions() -> None:
    from refit_runtime.adapters.vllm.driven import DrivenWorker

    worker: Any = object.__new__(DrivenWorker)
    worker.rank = 0
    worker.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(world_size=1, distributed_executor_backend="uni"))
    with pytest.raises(SpecError, match="one object for all ranks"):
        worker.update_weights([{"version": 1}, {"version": 2}])


class Engines:
    """What vLLM's clients are: four calls."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def init_weight_transfer_engine(self, info: dict[str, Any]) -> None:
        self.calls.append(("init", info))

    def start_weight_update(self) -> None:
        self.calls.append("start")

    def update_weights(self, info: dict[str, Any]) -> None:
        self.calls.append(("update", info))

    def finish_weight_update(self, version: str | None = None) -> None:
        self.calls.append(("finish", version))


def test_the_trainer_s_half_publishes_on_every_rank_and_the_first_tells_the_engines() -> None:
    from refit_runtime.adapters.vllm.sender import RefitTrainerInitInfo
    from vllm.distributed.weight_transfer import WeightTransferTrainerFactory as Factory

    published: list[int] = []
    version = iter([SimpleNamespace(number=4), None, SimpleNamespace(number=4), None])
    trainer: Any = SimpleNamespace(publish=lambda step: (published.append(step), next(version))[1])
    engines, others = Engines(), Engines()
    for rank, client in enumerate((engines, others)):
        sender = Factory.trainer_init(RefitTrainerInitInfo(trainer, step=10, rank=rank), client=client)
        sender.send_weights()
        sender.send_weights()  # skipped
    assert published == [10, 11, 10, 11]
    assert engines.calls == [("init", {}), "start", ("update", {"version": 4}), ("finish", "4")]
    assert others.calls == []


def test_a_source_of_gathered_tensors_is_refused() -> None:
    from refit_runtime.adapters.vllm.sender import RefitTrainerInitInfo
    from vllm.distributed.weight_transfer import ModuleSource, WeightTransferTrainerFactory

    trainer: Any = object()
    with pytest.raises(SpecError, match=r"TrainerClient\.bind"):
        WeightTransferTrainerFactory.trainer_init(RefitTrainerInitInfo(trainer, rank=0), client=Engines(), source=ModuleSource(torch.nn.Linear(1, 1)))
