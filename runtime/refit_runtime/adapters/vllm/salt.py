"""`kv: Salt`: the version is part of the key of every cached block, so blocks of older weights are never hit, and nothing is recomputed.

It is done in the engine core's main loop, where adding a request and changing the version cannot overlap: a request's salt is the version that
serves when it is added, and a version's label gives its salt to everything that has no computed token yet. A request that runs across a commit
keeps its blocks and its old salt; nobody who came later can hit them.
"""

from __future__ import annotations

import functools
from typing import Any

_MARK = "__refit__"
SEPARATOR = "\x00"  # no client can send it in a header or label: its own salt and ours stay apart


def salt_requests() -> None:
    """Idempotent; once in each process, before an engine core exists."""
    from vllm.v1.engine.core import EngineCore

    if hasattr(EngineCore.add_request, _MARK) or not hasattr(EngineCore, "set_weight_version"):
        return
    add_request, set_weight_version = EngineCore.add_request, EngineCore.set_weight_version

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
    EngineCore.add_request, EngineCore.set_weight_version = add_salted, label_and_salt


def salt(request: Any, version: str) -> None:
    """Of a request that holds no blocks: what it will hit and leave in the cache is keyed by `version` and by its own salt."""
    own = (request.cache_salt or "").rpartition(SEPARATOR)[2]
    wanted = f"{version}{SEPARATOR}{own}"
    if request.cache_salt != wanted:
        request.cache_salt = wanted
        request.block_hashes.clear()
        request.update_block_hashes()
