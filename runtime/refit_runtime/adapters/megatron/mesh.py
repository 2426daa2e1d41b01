"""A trainer rank's place on Megatron's parallel axes, given as facts: nothing here reads a process group."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from refit_api.errors import UnsupportedLayout


@dataclass(frozen=True, slots=True)
class Axis:
    """Place `rank` of `size` on one axis."""

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        if type(self.rank) is not int or type(self.size) is not int or not 0 <= self.rank < self.size:
            raise UnsupportedLayout(
                f"parallel axis: rank {self.rank!r} of size {self.size!r}; expected whole numbers with 0 <= rank < size", rank=self.rank, size=self.size
            )


ALONE = Axis()


@dataclass(frozen=True, slots=True)
class Mesh:
    """`rank` counts all trainer ranks. Dense tensors are cut over `tp`, experts over `ep` and `etp`, layers over `pp`.

    `dp` counts data-parallel and context-parallel replicas together.
    """

    rank: int
    tp: Axis = ALONE
    pp: Axis = ALONE
    ep: Axis = ALONE
    etp: Axis = ALONE
    dp: Axis = ALONE

    def check(self, config: Any) -> None:
        """Raises UnsupportedLayout where the model was built for other sizes."""
        built = {
            "tp": config.tensor_model_parallel_size,
            "pp": config.pipeline_model_parallel_size,
            "ep": config.expert_model_parallel_size,
            "etp": config.expert_tensor_parallel_size if config.num_moe_experts else None,
        }
        for field in fields(self):
            size = built.get(field.name)
            if size is not None and getattr(self, field.name).size != size:
                raise UnsupportedLayout(
                    f"mesh.{field.name} has size {getattr(self, field.name).size}, the model was built for {size}: give the mesh it runs on",
                    seen=getattr(self, field.name).size,
                    expected=size,
                )
