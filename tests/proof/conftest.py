"""vLLM's own settings, before anything imports it."""

from __future__ import annotations

import os

os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind", HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="WARNING", VLLM_NO_USAGE_STATS="1")
