"""A real engine that a framework drives over HTTP by vLLM's own weight-transfer API, with vLLM's own client: nothing in it knows of Refit but the names."""

from __future__ import annotations

import hashlib
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from refit_api.mounted import Rollout
from refit_api.wire import Role
from refit_operator.catalog.local import LocalCatalog

from e2e.workloads.tiny_llama import TinyLlama
from tests.adapters.vllm.served import START_SECONDS, Server, mounted, serving, settings
from tests.adapters.vllm.story import policy
from tests.adapters.vllm.traffic import PROMPTS

LIVE_AS_TRAINED = ("model.embed_tokens.weight", "model.layers.1.self_attn.o_proj.weight", "model.layers.0.mlp.down_proj.weight", "model.norm.weight")


@pytest.mark.engine
def test_a_framework_drives_an_engine_through_vllm_s_own_api(catalog_server: LocalCatalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each update is live byte for byte, also with a request in flight; a version that cannot be had leaves the one before, and the next update works."""
    import requests
    from refit_runtime.adapters.torch_module import TorchSource
    from refit_runtime.adapters.vllm.sender import RefitTrainerInitInfo
    from refit_runtime.wiring import TrainerClient
    from vllm.distributed.weight_transfer import HTTPVLLMWeightSyncClient, WeightTransferTrainerFactory

    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    TinyLlama().write_config(tmp_path / "model")
    trained = policy(1)
    given = mounted(catalog_server, tmp_path, "generator-0", Role.GENERATOR).model_copy(update={"rollout": Rollout(policy="Manual")})
    with (
        serving(tmp_path / "model", tmp_path, given, "generator-0") as server,
        closing(TrainerClient(settings(catalog_server, tmp_path, "trainer-0", Role.TRAINER), 0, 1)) as trainer,
    ):
        trainer.bind(TorchSource(trained))
        server.until("the server answers", lambda: healthy(server), START_SECONDS)
        engines = HTTPVLLMWeightSyncClient(f"http://127.0.0.1:{server.port}")
        sender = WeightTransferTrainerFactory.trainer_init(RefitTrainerInitInfo(trainer, rank=0), client=engines)

        paused(server, sender.send_weights)
        assert_live(server, trained, "1")
        first = checksums(server)

        answers: list[dict[str, Any]] = []
        request = threading.Thread(target=lambda: answers.append(long_answer(server)))
        request.start()
        for parameter, new in zip(trained.parameters(), policy(2).parameters(), strict=True):
            parameter.data.copy_(new)
        paused(server, sender.send_weights)
        request.join(120)
        assert answers[0]["usage"]["completion_tokens"] == 100
        assert_live(server, trained, "2")
        assert not set(first.values()) & set(checksums(server).values())

        engines.start_weight_update()
        with pytest.raises(requests.HTTPError):
            engines.update_weights({"version": 9})
        assert_live(server, trained, "2")
        engines.start_weight_update()
        engines.update_weights({})
        engines.finish_weight_update("2")
        assert_live(server, trained, "2")
        assert long_answer(server)["usage"]["completion_tokens"] == 100


def healthy(server: Server) -> bool:
    try:
        return server.ask("/get_world_size")[0] == 200
    except OSError:
        return False


def paused(server: Server, work: Any) -> None:
    """What a framework does around an update; requests in flight go on with the new weights."""
    assert server.ask("/pause?mode=keep", {})[0] == 200
    work()
    assert server.ask("/resume", {})[0] == 200


def long_answer(server: Server) -> dict[str, Any]:
    status, answer, _ = server.ask("/v1/completions", {"model": "tiny", "prompt": PROMPTS[0], "max_tokens": 100, "ignore_eos": True})
    assert status == 200, answer
    return dict(answer)


def checksums(server: Server) -> dict[str, str]:
    """SHA-256 of the live parameters, by name."""
    status, answer, _ = server.ask("/weight_checker", {"action": "checksum"})
    assert status == 200, answer
    return {key.rsplit(":", 1)[-1]: digest for key, digest in answer["checksums"].items()}


def assert_live(server: Server, trained: torch.nn.Module, version: str) -> None:
    live = checksums(server)
    for name in LIVE_AS_TRAINED:
        tensor = trained.get_parameter(name).detach().contiguous().view(torch.uint8)
        assert live[name] == hashlib.sha256(tensor.numpy().tobytes()).hexdigest(), name
    assert server.ask("/weight_info")[1] == {"weight_version": version}
