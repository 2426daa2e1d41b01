"""vLLM: needs from the engine's own loader, a worker extension, the driver of its ranks, an endpoint plug-in."""
