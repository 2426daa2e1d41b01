"""A trainer rank's place on Megatron's parallel axes, given as facts: nothing here looks for a global process group."""

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

    @classmethod
    def of(cls, state: Any, rank: int) -> Mesh:
        """The facts as `state`, megatron.core's initialised `parallel_state`, has them."""
        replicas = Axis(state.get_data_parallel_rank(with_context_parallel=True), state.get_data_parallel_world_size(with_context_parallel=True))
        return cls(
            rank,
            tp=Axis(state.get_tensor_model_parallel_rank(), state.get_tensor_model_parallel_world_size()),
            pp=Axis(state.get_pipeline_model_parallel_rank(), state.get_pipeline_model_parallel_world_size()),
            ep=Axis(state.get_expert_model_parallel_rank(), state.get_expert_model_parallel_world_size()),
            etp=Axis(state.get_expert_tensor_parallel_rank(), state.get_expert_tensor_parallel_world_size()),
            dp=replicas,
        )

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
