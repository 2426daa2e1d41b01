"""NeMo-RL's refit over a group: `policy.generation.refit_transport: "refit_runtime.adapters.nemo_rl:RefitCheckpointEngine"`.

NeMo-RL's weight synchroniser makes one engine of this class in every policy and rollout worker and calls it in its order: prepare, one of the two
`init_*_process_group`, then for each refit `send_weights` on one side while `receive_weight_batches` runs on the other, at last `finalize`. Its base class
is an interface without behaviour, so this one only has its methods: nothing of NeMo-RL is imported.

- A policy worker sees each tensor whole, once, in an iterator that all ranks must drain together; what it keeps of it is its own portion, so that all of
  them publish a version together and no rank serves it alone.
- Which tensors there are is known once the first refit has passed by. The first policy rank posts it on a board (a store of torch's, whose address is
  the metadata that the synchroniser hands round); rollout ranks need all of it, whole, and register before anybody publishes.
- The n-th refit is step n of a run that the first policy rank named. Rollout ranks stage and verify it, then install it into memory of their own, and
  give copies of that to the framework's loader: nothing that failed is ever given, and no loader writes into what was checked.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar
from uuid import uuid4

import torch
from refit_api.errors import PeerUnavailable, ShapeMismatch, SpecError, UnsupportedLayout
from refit_api.tensors import Box, CoordinateNeeds, Dtype, Need, Parameter, RankShards, Shard, TensorSpec, box_elements, whole
from refit_api.wire import Version
from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]  # it is exported, by a star

from refit_runtime.adapters.torch_module import dtype_of
from refit_runtime.control import ControlClient
from refit_runtime.generator import GeneratorClient
from refit_runtime.patience import Patience
from refit_runtime.ports import Seams
from refit_runtime.settings import RuntimeSettings
from refit_runtime.trainer import TrainerClient
from refit_runtime.wiring import seams_of

CUT_BYTES = 1 << 20  # no part of a tensor is smaller
COORDINATE = "tp0"  # rollout ranks need all, so they are replicas of each other

T = TypeVar("T")


class RefitCheckpointEngine:
    """`bucket_size`: bytes given to the loader at a time. `device`: where rollout ranks keep weights, `cpu` or `cuda`. Settings are the pod's."""

    shard_expert_weights = False

    def __init__(self, bucket_size: int, device: str = "cpu", release_after_refit: bool = False) -> None:
        if device not in ("cpu", "cuda"):
            raise SpecError(f"refit_cfg: device {device!r}; expected cpu or cuda", seen=device, expected="cpu, cuda")
        self._bucket_size, self._device = bucket_size, device
        self._settings = RuntimeSettings.load()
        self._board: Board | None = None
        self._side: _Policy | _Rollout | None = None

    def seams(self, settings: RuntimeSettings, local_rank: int) -> Seams:
        """The outside that both sides use."""
        return seams_of(settings, local_rank)

    def get_target_weight_layout(self) -> None:
        """Nothing is filtered before it is sent: rollout ranks need whole tensors."""

    def prepare(self) -> dict[str, Any]:
        self._board = Board.opened(self._settings)
        return {"run": uuid4().hex, "host": self._settings.pod.ip, "port": self._board.port}

    def init_policy_process_group(self, *, worker_rank: int, train_world_size: int, rollout_world_size: int, metadata: list[Any]) -> None:
        run, board = self._met(metadata, worker_rank == 0)
        seams = self.seams(self._settings, self._settings.run.local_rank)
        trainer = TrainerClient(self._settings, worker_rank, train_world_size, seams, run)
        self._side = _Policy(self._settings, seams, trainer, Portions(worker_rank, train_world_size), board, rollout_world_size)

    def init_rollout_process_group(self, *, rollout_rank: int, train_world_size: int, rollout_world_size: int, metadata: list[Any]) -> None:
        run, board = self._met(metadata, False)
        seams = self.seams(self._settings, rollout_rank)
        generator = GeneratorClient(self._settings, COORDINATE, seams, instance=str(rollout_rank))
        device = torch.device(self._device) if self._device == "cpu" else torch.device("cuda", torch.cuda.current_device())
        self._side = _Rollout(self._settings, seams, generator, board, run, rollout_rank, device)

    def _met(self, metadata: list[Any], first: bool) -> tuple[str, Board]:
        """The run, and the board of the first policy rank, which keeps its own."""
        assert self._board is not None, "prepare comes first"
        said = metadata[0]
        board = self._board if first else Board.joined(self._settings, said["host"], said["port"])
        self._board = None
        return said["run"], board

    async def send_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Returns once the version is whole and sealed; what rollout ranks still read stays as it is."""
        assert isinstance(self._side, _Policy), "init_policy_process_group comes first"
        await self._side.control.aio.wait_ready(self._side.publish(weights).number, self._side.seconds)

    async def receive_weight_batches(self) -> AsyncIterator[list[tuple[str, torch.Tensor]]]:
        """All tensors of the refit, after all of them were verified."""
        assert isinstance(self._side, _Rollout), "init_rollout_process_group comes first"
        for batch in batches(self._side.updated(), self._bucket_size):
            yield [(name, tensor.clone()) for name, tensor in batch]

    def finalize(self) -> None:
        if self._side is not None:
            self._side.close()
        self._side = self._board = None


def batches(tensors: Iterable[tuple[str, torch.Tensor]], size: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Of at most `size` bytes each, or of one tensor."""
    batch: list[tuple[str, torch.Tensor]] = []
    for name, tensor in tensors:
        if batch and sum(each.nbytes for _, each in batch) + tensor.nbytes > size:
            yield batch
            batch = []
        batch.append((name, tensor))
    if batch:
        yield batch


class Board:
    """What policy ranks tell rollout ranks before they can plan. It carries names and shapes; weights and keys go other ways."""

    def __init__(self, store: TCPStore, seconds: float) -> None:
        self._store, self._seconds = store, seconds

    @classmethod
    def opened(cls, settings: RuntimeSettings) -> Board:
        return cls._made(settings, settings.pod.ip, 0, opens=True)

    @classmethod
    def joined(cls, settings: RuntimeSettings, host: str, port: int) -> Board:
        return cls._made(settings, host, port, opens=False)

    @classmethod
    def _made(cls, settings: RuntimeSettings, host: str, port: int, opens: bool) -> Board:
        seconds = settings.rollout.progress_deadline_seconds
        store = _heard(lambda: TCPStore(host, port, None, opens, timedelta(seconds=seconds), wait_for_workers=False), f"{host}:{port}", seconds)
        return cls(store, seconds)

    @property
    def port(self) -> int:
        return int(self._store.port)

    def post(self, specs: Sequence[TensorSpec]) -> None:
        self._store.set("tensors", json.dumps([[spec.name, spec.dtype.value, spec.shape] for spec in specs]))

    def posted(self) -> tuple[TensorSpec, ...]:
        """Waits for them."""
        said = _heard(lambda: self._store.get("tensors"), "the first policy rank, which has sent nothing", self._seconds)
        return tuple(TensorSpec(name, Dtype(dtype), tuple(shape)) for name, dtype, shape in json.loads(said))

    def bound(self, rollout_rank: int) -> None:
        self._store.set(f"bound {rollout_rank}", "")

    def wait_bound(self, ranks: int) -> None:
        keys = [f"bound {rank}" for rank in range(ranks)]
        _heard(lambda: self._store.wait(keys, timedelta(seconds=self._seconds)), f"all of {ranks} rollout ranks", self._seconds)


def _heard(call: Callable[[], T], who: str, seconds: float) -> T:
    try:
        return call()
    except DistError as error:
        raise PeerUnavailable(f"not heard in {seconds:g} s: {who} ({error}); refit again, or restart the run") from error


def portion(spec: TensorSpec, first: int, rank: int, world: int) -> tuple[Box | None, int]:
    """What of a tensor a rank publishes, its rows being dealt out from rank `first` on; and whose turn is next."""
    rows = spec.shape[0] if spec.shape else 1
    parts = max(1, min(rows, world, box_elements(whole(spec.shape)) * spec.dtype.bytes // CUT_BYTES))
    mine, following = (rank - first) % world, (first + parts) % world
    if mine >= parts:
        return None, following
    cut = whole(spec.shape) if parts == 1 else ((rows * mine // parts, rows * (mine + 1) // parts), *whole(spec.shape[1:]))
    return cut, following


class Portions:
    """A weight source: a rank's portions of tensors that pass by, in memory of its own, since the framework's is gone afterwards."""

    def __init__(self, rank: int, world: int) -> None:
        self._rank, self._world = rank, world
        self._kept: dict[str, tuple[Shard, torch.Tensor]] = {}
        self.specs: tuple[TensorSpec, ...] = ()
        """Of the first refit that passed by whole."""

    def take(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Drains it. Raises UnsupportedLayout, ShapeMismatch: alike on all ranks, which all see the same."""
        known, seen, first = {spec.name: spec for spec in self.specs}, dict[str, TensorSpec](), 0
        for name, tensor in weights:
            spec = TensorSpec(name, dtype_of(name, tensor), tuple(tensor.shape))
            if name in seen:
                raise UnsupportedLayout(f"{name}: sent twice in one refit", tensor=name)
            if known and known.get(name) != spec:
                raise ShapeMismatch(f"{name}: {_told(spec)}, in the first refit {_told(known.get(name))}: restart the run", tensor=name)
            seen[name] = spec
            if not known:
                box, first = portion(spec, first, self._rank, self._world)
                if box is not None:
                    self._kept[name] = Shard(spec, box), _part(tensor, box).clone(memory_format=torch.contiguous_format)
            elif name in self._kept:
                shard, memory = self._kept[name]
                memory.copy_(_part(tensor, shard.box))
        missing = sorted(known.keys() - seen.keys())
        if missing:
            raise ShapeMismatch(f"{len(missing)} tensors of the first refit are not in this one ({', '.join(missing[:8])}): restart the run", seen=len(seen))
        self.specs = self.specs or tuple(seen.values())

    def shards(self) -> RankShards:
        return RankShards(self._rank, self._rank, tuple(shard for shard, _ in self._kept.values()))

    def view(self, index: int) -> torch.Tensor:
        return list(self._kept.values())[index][1]


def _part(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    return tensor.detach()[tuple(slice(lo, hi) for lo, hi in box)]


def _told(spec: TensorSpec | None) -> str:
    return f"{spec.dtype.value} {spec.shape}" if spec is not None else "not there"


class Copies:
    """A weight target: all tensors, whole, under their own names."""

    def __init__(self, specs: Sequence[TensorSpec], device: torch.device) -> None:
        self._memory = {spec.name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype.value), device=device) for spec in specs}
        needs = (Need(spec.name, whole(spec.shape), Parameter(spec.name, spec.dtype, spec.shape), whole(spec.shape), shape=spec.shape) for spec in specs)
        self._needs = CoordinateNeeds(COORDINATE, tuple(needs))

    def needs(self) -> CoordinateNeeds:
        return self._needs

    def view(self, parameter: str) -> torch.Tensor:
        return self._memory[parameter]

    def remake(self) -> None:
        """The framework's loader makes what is derived."""

    def tensors(self) -> Iterable[tuple[str, torch.Tensor]]:
        """In the order in which they were sent."""
        return self._memory.items()


class _Policy:
    def __init__(self, settings: RuntimeSettings, seams: Seams, trainer: TrainerClient, portions: Portions, board: Board, rollout_ranks: int) -> None:
        self._seams, self._trainer, self._portions, self._board = seams, trainer, portions, board
        self._rollout_ranks = rollout_ranks
        self._step = self._published = 0
        self.control = ControlClient(settings, seams.catalog, seams.clock)
        self.seconds = settings.versions.publish_deadline_seconds

    def publish(self, weights: Iterator[tuple[str, torch.Tensor]]) -> Version:
        self._step += 1  # before anything can fail: both sides count refits, those that failed too
        first = not self._portions.specs
        self._trainer.release(self._published, self.seconds)  # readers first: with snapshot InPlace it is the portions that they read
        self._portions.take(weights)
        if first:
            self._trainer.bind(self._portions)
            self._board.post(self._portions.specs)
        self._board.wait_bound(self._rollout_ranks)
        deadline = self._seams.clock.monotonic() + self.seconds
        version = Patience(self._seams, self._trainer.worker).until(deadline, lambda: self._trainer.publish(self._step))
        if version is None:
            raise SpecError("spec.trainer.onBusy Skip leaves versions out, and NeMo-RL waits for each: use Wait", seen="Skip", expected="Wait")
        self._published = version.number
        return version

    def close(self) -> None:
        self._trainer.close()
        self.control.close()


class _Rollout:
    def __init__(
        self, settings: RuntimeSettings, seams: Seams, generator: GeneratorClient, board: Board, run: str, rank: int, device: torch.device
    ) -> None:  # fmt: skip
        self._generator, self._board, self._run, self._rank, self._device = generator, board, run, rank, device
        self._control = ControlClient(settings, seams.catalog, seams.clock)
        self._seconds = settings.rollout.progress_deadline_seconds
        self._copies: Copies | None = None
        self._step = 0

    def updated(self) -> Iterable[tuple[str, torch.Tensor]]:
        """The tensors of the next step, installed here. Raises what kept it from that; then the framework got nothing."""
        self._step += 1
        if self._copies is None:
            copies = Copies(self._board.posted(), self._device)
            self._generator.bind(copies)
            self._board.bound(self._rank)
            self._copies = copies
        created = self._control.create(self._run, self._step, self._seconds)
        version = self._control.wait_ready(created.number, self._seconds)
        self._generator.install(self._generator.stage(version.number))
        return self._copies.tensors()

    def close(self) -> None:
        self._generator.close()
        self._control.close()
