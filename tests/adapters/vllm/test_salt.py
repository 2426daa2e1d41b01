"""Cached blocks of one version are never hit under another, and nobody who came before a commit smuggles one in."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from refit_runtime.adapters.vllm.salt import salt, salt_requests

BLOCK = 4


def request(own: str | None = None, computed: int = 0) -> Any:
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    made = Request("r", list(range(12)), SamplingParams(max_tokens=1), None, cache_salt=own, block_hasher=get_request_block_hasher(BLOCK, sha256))
    made.num_computed_tokens = computed
    return made


def keys(version: str, own: str | None = None) -> list[bytes]:
    made = request(own)
    salt(made, version)
    return list(made.block_hashes)


def test_every_block_is_keyed_by_version_and_by_the_client_s_own_salt() -> None:
    all_keys = [key for version in ("1", "2") for own in (None, "tenant") for key in keys(version, own)]
    assert len(set(all_keys)) == len(all_keys) == 4 * 3
    assert keys("1", "tenant") == keys("1", "tenant")


def test_salting_again_replaces_the_version_and_keeps_the_client_s_salt() -> None:
    made = request("tenant")
    salt(made, "1")
    salt(made, "2")
    assert list(made.block_hashes) == keys("2", "tenant")


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An engine core with our hooks around its own methods, and a scheduler that only keeps requests."""
    from vllm.v1.engine.core import EngineCore

    for name in ("preprocess_add_request", "add_request", "set_weight_version"):
        monkeypatch.setattr(EngineCore, name, EngineCore.__dict__[name])
    salt_requests()
    salt_requests()
    made = EngineCore.__new__(EngineCore)
    made._weight_version = "default"
    made.scheduler = SimpleNamespace(requests={}, add_request=lambda new: made.scheduler.requests.update({id(new): new}))
    return made


def test_a_request_is_salted_when_it_is_added_and_again_by_a_commit_unless_it_holds_blocks(core: Any) -> None:
    waiting, running = request(), request(computed=8)
    core.add_request(waiting)
    core.add_request(running)
    before = list(running.block_hashes)
    core.set_weight_version("5")
    assert list(waiting.block_hashes) == keys("5"), "it has computed nothing: it must not hit older blocks"
    assert list(running.block_hashes) == before, "it keeps its blocks, and leaves new ones where nobody finds them"
    late = request()
    core.add_request(late)
    assert list(late.block_hashes) == keys("5")
