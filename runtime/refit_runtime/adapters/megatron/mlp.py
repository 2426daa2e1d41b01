"""MLPs: dense, routed experts (one module each, or grouped) and shared experts.

Experts are numbered by the layer's own `local_expert_indices`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from refit_api.errors import UnsupportedLayout

from refit_runtime.adapters.megatron.layout import Halves, Layout
from refit_runtime.adapters.megatron.linear import At, Leaf, bias_of, cut, kind_of, linear, present
from refit_runtime.adapters.megatron.mesh import Axis
from refit_runtime.adapters.megatron.names import Slot

if TYPE_CHECKING:
    import torch


def mlp(at: At) -> Iterator[Leaf]:
    kind = kind_of(at.module)
    if kind == "MLP":
        yield from pair(at, Slot.FC1, Slot.FC2, at.module.config.ffn_hidden_size, at.mesh.tp)
    elif kind == "MoELayer":
        yield from mixture(at)


def pair(at: At, fc1: Slot, fc2: Slot, ffn: int, axis: Axis) -> Iterator[Leaf]:
    hidden = at.module.config.hidden_size
    rows, halves = fc1_rows(at, ffn)
    yield from linear(at, "linear_fc1", fc1, (rows, hidden), axis, halves)
    yield from linear(at, "linear_fc2", fc2, (hidden, ffn), axis)


def fc1_rows(at: At, ffn: int) -> tuple[int, Halves | None]:
    if getattr(at.module.config, "moe_mlp_glu_interleave_size", None):
        raise UnsupportedLayout(
            f"{at.path}.linear_fc1: moe_mlp_glu_interleave_size is set, so gate and up rows alternate in blocks; checkpoints have gate rows, then up rows: "
            "train without it, or give the tensors from your own source",
            module=at.path,
            tensor="linear_fc1",
        )
    return (2 * ffn, Halves(ffn)) if at.module.config.gated_linear_unit else (ffn, None)


def mixture(at: At) -> Iterator[Leaf]:
    config = at.module.config
    router, experts, shared = at.child("router"), at.child("experts"), at.child("shared_experts")
    if router is not None and kind_of(router.module) == "TopKRouter":
        yield from gate(router, config)
    if experts is not None:
        yield from routed(experts, expert_ids(at, config), config)
    if shared is not None and kind_of(shared.module) == "SharedExpertMLP":
        yield from pair(shared, Slot.SHARED_FC1, Slot.SHARED_FC2, config.moe_shared_expert_intermediate_size, at.mesh.tp)
        if present(shared.module, "gate_weight"):
            yield shared.leaf("gate_weight", Slot.SHARED_GATE, Layout((1, config.hidden_size)))


def routed(at: At, ids: tuple[int, ...], config: Any) -> Iterator[Leaf]:
    kind = kind_of(at.module)
    if kind == "SequentialMLP":
        for index, (expert, module) in enumerate(zip(ids, at.module.local_experts, strict=True)):
            if kind_of(module) == "MLP":
                one = replace(at, module=module, path=f"{at.path}.local_experts.{index}", expert=expert)
                yield from pair(one, Slot.EXPERT_FC1, Slot.EXPERT_FC2, config.moe_ffn_hidden_size, at.mesh.etp)
    elif kind == "TEGroupedMLP":
        yield from grouped_linears(at, ids, config)
    elif kind == "GroupedMLP":
        yield from grouped_weights(at, ids, config)


def gate(at: At, config: Any) -> Iterator[Leaf]:
    experts = config.num_moe_experts
    yield at.leaf("weight", Slot.ROUTER, Layout((experts, config.hidden_size)))
    if present(at.module, "bias"):
        yield at.leaf("bias", Slot.ROUTER, Layout((experts,)), "bias")
    if present(at.module, "expert_bias"):
        yield at.leaf("expert_bias", Slot.ROUTER_CORRECTION, Layout((experts,)), "")


def expert_ids(at: At, config: Any) -> tuple[int, ...]:
    """Global ids of the local experts, as the layer itself numbers them."""
    ids = tuple(at.module.local_expert_indices)
    count, size = config.num_moe_experts, at.mesh.ep.size
    if len(set(ids)) != len(ids) or not all(type(i) is int and 0 <= i < count for i in ids) or len(ids) * size != count:
        raise UnsupportedLayout(
            f"{at.path}.local_expert_indices: {list(ids)} on expert-parallel rank {at.mesh.ep.rank} of {size}; "
            f"expected {count // size} different ids below {count}",
            module=at.path,
            tensor="experts",
            seen=list(ids),
        )
    return ids


def grouped_linears(at: At, ids: tuple[int, ...], config: Any) -> Iterator[Leaf]:
    """Transformer Engine's grouped linears hold `weight0`, `weight1`, ..., one for each local expert."""
    hidden, ffn = config.hidden_size, config.moe_ffn_hidden_size
    rows, halves = fc1_rows(at, ffn)
    for name, slot, shape, parts in (("linear_fc1", Slot.EXPERT_FC1, (rows, hidden), halves), ("linear_fc2", Slot.EXPERT_FC2, (hidden, ffn), None)):
        child = at.child(name)
        layout = None if child is None else cut(child.module, shape, at.mesh.etp, parts)
        if child is None or layout is None:
            continue
        for index, expert in enumerate(ids):
            one = replace(child, expert=expert)
            yield one.leaf(f"weight{index}", slot, layout)
            if present(child.module, f"bias{index}"):
                yield one.leaf(f"bias{index}", slot, bias_of(layout), "bias")


def grouped_weights(at: At, ids: tuple[int, ...], config: Any) -> Iterator[Leaf]:
    """Two parameters hold all local experts, transposed: seen as (experts, hidden, rows) and (experts, columns, hidden)."""
    hidden, ffn, etp = config.hidden_size, config.moe_ffn_hidden_size, at.mesh.etp
    rows, halves = fc1_rows(at, ffn)

    def of(index: int, columns: int) -> Any:
        def lens(memory: torch.Tensor) -> torch.Tensor:
            return memory.view(len(ids), -1, columns)[index].T

        return lens

    for index, expert in enumerate(ids):
        one = replace(at, expert=expert)
        yield replace(one.leaf("weight1", Slot.EXPERT_FC1, Layout((rows, hidden), 0, etp, halves)), lens=of(index, rows // etp.size))
        yield replace(one.leaf("weight2", Slot.EXPERT_FC2, Layout((hidden, ffn), 1, etp)), lens=of(index, hidden))
