"""Live weights of a module whose parameters are DTensors: FSDP2 (`fully_shard`), HSDP, tensor parallelism, or several of them.

`placement` says which box a rank holds, `source` is the port's implementation.
"""
