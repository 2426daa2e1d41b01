"""Live weights of a Megatron-core model as shards of checkpoint tensors.

`mesh` says which rank this is, `names` what the tensors are called in checkpoints, `model` (with `attention`, `mlp`, `linear`)
finds what every module holds, `source` is the port's implementation. Modules are known by their type's name and read by attribute,
so megatron.core and Transformer Engine are needed by whoever built the model, not by these files.
Whatever is not found this way is refused by module and tensor name: nothing is guessed, nothing is left out.
"""
