"""`kv: Salt`: the version is part of the key of every cached block, so blocks of older weights are never hit, and nothing is recomputed.

It is done in the engine core's main loop, where adding a request and changing the version cannot overlap: a request's salt is the version that
serves when it is added, and a version's label gives its salt to everything that has no computed token yet. A request that runs across a commit
keeps its blocks and its old salt; nobody who came later can hit them.
"""

from __future__ import annotations

import functools
from typing import Any

_MARK = "__refit__"
SEPARATOR = "\x00"  # between ours and the client's own; of a client's salt that has one, what follows it counts


def salt_requests() -> None:
    """Idempotent; once in each process, before an engine core exists."""
    from vllm.v1.engine.core import EngineCore

    if hasattr(EngineCore.add_request, _MARK) or not hasattr(EngineCore, "set_weight_version"):
        return
    preprocess, add_request, set_weight_version = EngineCore.preprocess_add_request, EngineCore.add_request, EngineCore.set_weight_version

    @functools.wraps(preprocess)
    def preprocess_salted(self: Any, request: Any) -> Any:
        """In the input thread, where block keys are computed first: they are right already unless a commit comes before the request is added."""
        request.cache_salt = salted(request.cache_salt, self._weight_version)
        return preprocess(self, request)

    @functools.wraps(add_request)
    def add_salted(self: Any, request: Any, *args: Any, **kwargs: Any) -> None:
        salt(request, self._weight_version)
        add_request(self, request, *args, **kwargs)

    @functools.wraps(set_weight_version)
    def label_and_salt(self: Any, weight_version: str) -> None:
        set_weight_version(self, weight_version)
        for request in self.scheduler.requests.values():
            if request.num_computed_tokens == 0:
                salt(request, weight_version)

    setattr(add_salted, _MARK, True)
    EngineCore.preprocess_add_request, EngineCore.add_request, EngineCore.set_weight_version = preprocess_salted, add_salted, label_and_salt


def salt(request: Any, version: str) -> None:
    """Of a request that holds no blocks: what it will hit and leave in the cache is keyed by `version` and by its own salt."""
    wanted = salted(request.cache_salt, version)
    if request.cache_salt != wanted:
        request.cache_salt = wanted
        request.block_hashes.clear()
        request.update_block_hashes()


def salted(own: str | None, version: str) -> str:
    return f"{version}{SEPARATOR}{(own or '').rpartition(SEPARATOR)[2]}"
