"""What a leaf module holds: one tensor of the whole model, cut over one axis or whole on every rank.

The module's type says how it is cut; the attributes that Megatron puts on parameters (`tensor_model_parallel`, `partition_dim`,
`partition_stride`) must not contradict it. A module whose type is unknown yields nothing here and is refused at the end of the walk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from refit_api.errors import UnsupportedLayout
from refit_api.tensors import Shape

from refit_runtime.adapters.megatron.layout import Halves, Heads, Layout
from refit_runtime.adapters.megatron.mesh import Axis, Mesh
from refit_runtime.adapters.megatron.names import Slot

if TYPE_CHECKING:
    import torch

COLUMN = frozenset({"ColumnParallelLinear", "TEColumnParallelLinear", "TELayerNormColumnParallelLinear", "TEColumnParallelGroupedLinear"})
ROW = frozenset({"RowParallelLinear", "TERowParallelLinear", "TERowParallelGroupedLinear"})
WHOLE = frozenset({"TELinear"})  # Megatron uses it for projections that every rank repeats
NORM = frozenset({"RMSNorm", "LayerNorm", "FusedLayerNorm"})
HOSTS = frozenset({"megatron", "transformer_engine", "torch", "apex"})

FUSED_NORM = {Slot.QKV: Slot.ATTENTION_NORM, Slot.FC1: Slot.MLP_NORM, Slot.MLA_Q_UP: Slot.MLA_Q_NORM, Slot.MLA_KV_UP: Slot.MLA_KV_NORM}
"""Which norm it is that a linear module carries as `layer_norm_weight`."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """One tensor that a module holds. `lens` shows it in the layout's orientation, as a view of the same memory."""

    path: str
    slot: Slot
    kind: str  # "weight" or "bias"; "" for a tensor whose slot is its whole name
    layout: Layout
    layer: int | None
    expert: int | None
    module: Any
    attribute: str
    lens: Callable[[torch.Tensor], torch.Tensor] | None = None
    around_zero: bool | None = None  # of a norm's weight: whether its module adds 1 to it

    def held(self) -> Any:
        """The parameter or buffer itself: its identity tells what has been accounted for."""
        return getattr(self.module, self.attribute)

    def view(self) -> torch.Tensor:
        tensor: torch.Tensor = self.held().detach()
        return tensor if self.lens is None else self.lens(tensor)


@dataclass(frozen=True, slots=True)
class At:
    """A module and its place in the model."""

    module: Any
    path: str
    mesh: Mesh
    layer: int | None = None
    expert: int | None = None

    def child(self, name: str) -> At | None:
        module = getattr(self.module, name, None)
        return None if module is None else replace(self, module=module, path=f"{self.path}.{name}" if self.path else name)

    def leaf(self, attribute: str, slot: Slot, layout: Layout, kind: str = "weight") -> Leaf:
        path = f"{self.path}.{attribute}" if self.path else attribute
        return Leaf(path, slot, kind, layout, self.layer, self.expert, self.module, attribute)


def kind_of(module: Any) -> str:
    """The name of the module's own type; a stranger's type is none, whatever it derives from, for it may lie differently in memory."""
    host = type(module).__module__.partition(".")[0]
    return type(module).__name__ if host in HOSTS else ""


def derives(module: Any, name: str) -> bool:
    """For modules that only contain others, a derived type is as good."""
    return any(base.__name__ == name and base.__module__.partition(".")[0] in HOSTS for base in type(module).__mro__)


def linear(at: At, name: str, slot: Slot, shape: Shape, axis: Axis, rows: Heads | Halves | None = None) -> Iterator[Leaf]:
    """A projection with weight `shape` (rows, columns), its bias, and the norm that it may carry."""
    child = at.child(name)
    layout = None if child is None else cut(child.module, shape, axis, rows)
    if child is None or layout is None:
        return
    if present(child.module, "weight"):
        yield child.leaf("weight", slot, layout)
    if present(child.module, "bias"):
        yield child.leaf("bias", slot, bias_of(layout), "bias")
    if present(child.module, "layer_norm_weight") and slot in FUSED_NORM:
        yield from norm_tensors(child, FUSED_NORM[slot], Layout(shape[1:]), at.module.config, "layer_norm_")


def norm(at: At, name: str, slot: Slot, width: int) -> Iterator[Leaf]:
    child = at.child(name)
    if child is not None and kind_of(child.module) in NORM:
        yield from norm_tensors(child, slot, Layout((width,)), at.module.config)


def norm_tensors(at: At, slot: Slot, layout: Layout, config: Any, prefix: str = "") -> Iterator[Leaf]:
    """Whether a norm adds 1 to its weight is the module's own affair; Megatron's flag must say the same."""
    for kind in ("weight", "bias"):
        if present(at.module, prefix + kind):
            leaf = at.leaf(prefix + kind, slot, layout, kind)
            yield replace(leaf, around_zero=adds_one(leaf, config)) if kind == "weight" else leaf


def adds_one(leaf: Leaf, config: Any) -> bool:
    own, flag = bool(getattr(leaf.module, "zero_centered_gamma", False)), bool(config.layernorm_zero_centered_gamma)
    if own != flag:
        raise UnsupportedLayout(
            f"{leaf.path} ({type(leaf.module).__name__}): the module's zero_centered_gamma is {own} and config.layernorm_zero_centered_gamma is {flag}: "
            "whether it lies around zero or around one is not known; make them agree",
            tensor=leaf.path,
            seen=own,
            expected=flag,
        )
    return own


def cut(module: Any, shape: Shape, axis: Axis, rows: Heads | Halves | None) -> Layout | None:
    """The layout of a linear module's weight, by the module's type."""
    kind = kind_of(module)
    if kind in COLUMN:
        return Layout(shape, 0, axis, rows)
    if kind in ROW and rows is None:
        return Layout(shape, 1, axis)
    if kind in WHOLE and rows is None and module.parallel_mode is None:
        return Layout(shape)
    return None


def bias_of(weight: Layout) -> Layout:
    """Cut with the weight's rows, or whole where its columns are cut."""
    rows = weight.shape[:1]
    return Layout(rows) if weight.dim == 1 else replace(weight, shape=rows)


def present(module: Any, attribute: str) -> bool:
    """A registered parameter or buffer: Transformer Engine leaves empty tensors where there is no bias."""
    return (module._parameters.get(attribute) if attribute in module._parameters else module._buffers.get(attribute)) is not None
