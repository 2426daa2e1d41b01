"""A Megatron rank as a `WeightSource`: facts at construction, live memory at every `view`.

Parameters are looked up again for every view, for Megatron moves `parameter.data` when it builds gradient and optimizer buffers.
What is published are the model's own parameters, whatever the optimizer keeps beside them: masters in float32, or a rank's part of them. An optimizer
that leaves the gathering of its parts to the next forward pass has to gather them before: until then a view is refused.
Norms are published as the family's checkpoints have them: around one, or around zero.
A tied output on the embedding's stage is the same memory and adds nothing; on another stage it is an equal copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from refit_api.errors import ShapeMismatch, UnsupportedLayout
from refit_api.tensors import Box, Dtype, RankShards, Shard, TensorSpec

from refit_runtime.adapters.megatron.linear import Leaf
from refit_runtime.adapters.megatron.mesh import Mesh
from refit_runtime.adapters.megatron.model import leaves
from refit_runtime.adapters.megatron.names import Family, family

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Held:
    """A shard, and the part of a leaf's memory that it is."""

    shard: Shard
    leaf: Leaf
    part: Box


class MegatronSource:
    """`chunks` are the rank's model, or its virtual stages. `names`: what tensors are called, by a known family's name (`model_type` of config.json) or given.

    `vocabulary` is the checkpoint's number of words. `dtype` is what parameters are published in, if not their own; buffers keep theirs.
    """

    def __init__(self, chunks: Sequence[Any], mesh: Mesh, names: str | Family, vocabulary: int, dtype: Dtype | None = None) -> None:
        table = family(names) if isinstance(names, str) else names
        found = (leaves(chunk, mesh, vocabulary, f"model[{index}]" if len(chunks) > 1 else "") for index, chunk in enumerate(chunks))
        self._held = tuple(held for of_chunk in found for leaf in of_chunk for held in shards_of(leaf, table, dtype))
        self._buckets = {parameter: bucket for chunk in chunks for parameter, bucket in getattr(chunk, "param_to_bucket_group", {}).items()}
        self._facts = RankShards(mesh.rank, mesh.dp.rank, tuple(held.shard for held in self._held))
        refuse_twice(self._held)

    def shards(self) -> RankShards:
        return self._facts

    def view(self, index: int) -> torch.Tensor:
        held = self._held[index]
        refuse_ungathered(held.leaf, self._buckets.get(held.leaf.held()))
        memory = held.leaf.view()
        expected = held.leaf.layout.local(held.leaf.path)
        if tuple(memory.shape) != expected:
            raise ShapeMismatch(
                f"{held.leaf.path}: shape {tuple(memory.shape)} now, {expected} when it was bound; bind the model again", tensor=held.shard.tensor.name
            )
        return memory[tuple(slice(lo, hi) for lo, hi in held.part)]


def shards_of(leaf: Leaf, names: Family, dtype: Dtype | None) -> Iterator[Held]:
    tensors, own = tensor_names(leaf, names), dtype_of(leaf)
    published = dtype if dtype is not None and leaf.attribute in leaf.module._parameters else own
    plus = 0.0 if leaf.around_zero is None else float(leaf.around_zero) - float(names.norms_around_zero)
    for piece in leaf.layout.pieces(tensors):
        yield Held(Shard(TensorSpec(piece.tensor, published, piece.shape), piece.box, plus), leaf, piece.local)


def tensor_names(leaf: Leaf, family: Family) -> tuple[str, ...]:
    """The checkpoint tensors that a leaf is made of. Raises UnsupportedLayout where the table has none, or another number of them."""
    stems = family.names.get(leaf.slot, ())
    stems = (stems,) if isinstance(stems, str) else stems
    wanted = leaf.layout.parts
    if len(stems) != wanted:
        raise UnsupportedLayout(
            f"{leaf.path} ({type(leaf.module).__name__}) is {leaf.slot.value!r} and holds {wanted} checkpoint tensors; "
            f"the table of names has {list(stems) or 'none'}: choose the family that the model is of, or give a mapping",
            module=leaf.path,
            tensor=leaf.slot.value,
            seen=len(stems),
            expected=wanted,
        )
    suffix = f".{leaf.kind}" if leaf.kind else ""
    return tuple(stem.format(layer=leaf.layer, expert=leaf.expert) + suffix for stem in stems)


def dtype_of(leaf: Leaf) -> Dtype:
    name = str(leaf.held().dtype).removeprefix("torch.")
    try:
        return Dtype(name)
    except ValueError:
        raise UnsupportedLayout(f"{leaf.path}: dtype {name}; expected one of {', '.join(d.value for d in Dtype)}", tensor=leaf.path, seen=name) from None


def refuse_ungathered(leaf: Leaf, bucket: Any) -> None:
    """`bucket`: Megatron's buffers of this and other parameters. Once gradients were reduced a step may have been taken, and each rank has its part of it."""
    if bucket is None or not bucket.ddp_config.overlap_param_gather:
        return
    may_have_stepped = any(shard is not None for shard in bucket.cached_grad_buffer_shard_list)
    if bucket.param_gather_handle is not None or (may_have_stepped and not bucket.param_gather_dispatched):
        raise UnsupportedLayout(
            f"{leaf.path} ({type(leaf.module).__name__}): overlap_param_gather is on and its data-parallel parts are not gathered yet; "
            "call start_param_sync(force_sync=True) of each DistributedDataParallel before you publish",
            tensor=leaf.path,
        )


def refuse_twice(held: Sequence[Held]) -> None:
    """One rank has one memory for each checkpoint tensor: a reader could not tell which of two is meant."""
    owners: dict[str, Leaf] = {}
    for one in held:
        name, leaf = one.shard.tensor.name, one.leaf
        if owners.setdefault(name, leaf) is not leaf:
            raise UnsupportedLayout(f"{leaf.path} and {owners[name].path} are both {name}: each checkpoint tensor has one memory", tensor=name, seen=leaf.path)
