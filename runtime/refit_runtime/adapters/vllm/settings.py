"""The one variable of vLLM's environment that our plug-ins depend on; only this module reads and writes it."""

from __future__ import annotations

import os
from importlib.metadata import entry_points

VARIABLE = "VLLM_PLUGINS"
_GROUPS = ("vllm.general_plugins", "vllm.platform_plugins", "vllm.io_processor_plugins", "vllm.stat_logger_plugins")


def allow_plugin(name: str) -> None:
    """vLLM mounts endpoint plug-ins only if the variable names them, and then loads nothing else: unset, it becomes all that would have been loaded, and ours.

    A list that the user wrote stays as it is; it names us already, or we would not have been called.
    """
    if VARIABLE not in os.environ:
        discovered = {entry.name for group in _GROUPS for entry in entry_points(group=group)}
        os.environ[VARIABLE] = ",".join(sorted(discovered | {name}))
