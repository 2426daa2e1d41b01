"""The transport over NIXL: one agent per process, memory registered once, pieces prepared once per holder.

- The agent is made before the process group of the same process (O1): registration and fabric start-up deadlock with collectives.
- NIXL has no deadlines: a read stays outstanding until NIXL says that it ended; whoever waits keeps the time and sleeps between two looks.
- A transfer handle is made once per piece and posted again for each version: a warm round allocates nothing.
- Metadata travels through our manifests only. An agent's name is unique: a new registration is a new agent, and old reads die with the old one.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any
from uuid import uuid4

import torch
from refit_api.errors import PeerUnavailable, SpecError, TransferError, WireMismatch
from refit_api.mounted import TransportSettings
from refit_api.wire import Manifest

from refit_runtime.ports import Peer, Read, Registration, Transfer

EVENT_WAIT_MICROSECONDS = 100_000
DEVICE_READS = "CUDA_IPC_ENABLE_GET_ZCOPY"
"""Of UCX, which leaves it off on hosts without NVLink: reads of device memory between processes then go through sockets, 0.5 GB/s on one H200 where the
devices' own copies give 1,500."""
_DETOUR = threading.Lock()
HINT = "NIXL is not installed in this image: pip install nixl (1.5 or newer), or see `refit doctor`"


class NixlTransport:
    """`environment` is what UCX reads behind our back: a variable that overrides a setting is refused, since it would win silently."""

    def __init__(self, settings: TransportSettings, environment: Mapping[str, str]) -> None:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            raise SpecError("the process group was initialised before Refit's client: make the client first, then call init_process_group (O1)")
        for variable, wanted in _parameters(settings)[1].items():
            if variable in environment:
                raise SpecError(f"{variable} is set in the environment and spec.transport sets it too: remove one", seen=environment[variable], expected=wanted)
        self._settings = settings
        self._own = () if f"UCX_{DEVICE_READS}" in environment else (f"{DEVICE_READS}=on",)
        self._api: Any = _load("nixl._api")
        self._faults = _fault_types(self._api)
        self._lock = threading.Lock()
        self._counters = {"registrations": 0, "connections": 0, "reads": 0, "bytes": 0}
        self._memory: list[torch.Tensor] = []
        self._peers: dict[str, int] = {}
        self._agent = self._make_agent()
        self._registration: Registration | None = None

    def _make_agent(self) -> Any:
        config = self._api.nixl_agent_config(backends=[], sync_mode=self._api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT)
        with waiting_for_events(self._api):
            agent = self._api.nixl_agent(f"refit-{uuid4()}", config)
        try:
            agent.create_backend(self._settings.backend, _parameters(self._settings, self._own)[0])
        except self._faults as error:
            raise SpecError(
                f"NIXL cannot start its backend {self._settings.backend} ({error}): check spec.transport.backend and devices",
                seen=", ".join(agent.get_plugin_list()),
            ) from error
        return agent

    def register(self, arena: torch.Tensor, *more: torch.Tensor) -> None:
        if self._memory:
            self.close()
            self._agent = self._make_agent()
        memory = [arena, *more]
        try:
            self._agent.register_memory(memory)
        except self._faults as error:
            size = sum(region.numel() for region in memory)
            raise TransferError(f"NIXL cannot register {size} bytes in {len(memory)} places ({error}): check the memory lock limit and the devices") from error
        device = max(arena.get_device(), 0)
        kind = "VRAM" if arena.is_cuda else "DRAM"
        self._memory = memory
        self._registration = Registration(self._agent.name, self._agent.get_agent_metadata(), arena.data_ptr(), device, kind)
        self._counters["registrations"] += 1

    def registration(self) -> Registration:
        assert self._registration is not None, "register before describing"
        return self._registration

    def connect(self, manifest: Manifest, pieces: Sequence[Read]) -> Peer:
        mine = self.registration()
        if mine.memory == "VRAM":  # the thread that reads needs the device's context before UCX looks for one
            torch.cuda.set_device(mine.device)
            torch.cuda.current_stream().synchronize()
        with self._lock, self._translated(manifest.agent):
            if manifest.agent not in self._peers:
                name = self._agent.add_remote_agent(manifest.metadata).decode()
                if name != manifest.agent:
                    self._agent.remove_remote_agent(name)
                    raise WireMismatch("the manifest names another agent than its metadata: fetch it again", seen=name, expected=manifest.agent)
                self._agent.make_connection(name)
                self._counters["connections"] += 1
            moves = [piece.moves() for piece in pieces]
            here = [(mine.base + local, size, mine.device) for piece in moves for _, local, size in piece]
            there = [(manifest.base + remote, size, manifest.device) for piece in moves for remote, _, size in piece]
            local = self._agent.prep_xfer_dlist("", here, mine.memory)
            remote = self._agent.prep_xfer_dlist(manifest.agent, there, manifest.memory)
            self._peers[manifest.agent] = self._peers.get(manifest.agent, 0) + 1
        ends = list(accumulate(len(piece) for piece in moves))
        of_piece = tuple(range(end - len(piece), end) for piece, end in zip(moves, ends, strict=True))
        return _NixlPeer(self, self._agent, manifest.agent, (local, remote), of_piece, tuple(piece.bytes for piece in pieces))

    def counters(self) -> Mapping[str, int]:
        return dict(self._counters)

    def post(self, agent: Any, peer: str, handle: Any, size: int) -> Transfer:
        """`agent` is the one that made the handle: reads of a replaced agent are refused."""
        if agent is not self._agent:
            raise PeerUnavailable("the connection belongs to an agent that was replaced: connect again", peer=peer)
        with self._translated(peer):
            ended = _ended(agent.transfer(handle), peer)
        self._counters["reads"] += 1
        self._counters["bytes"] += size
        return _NixlTransfer(self, agent, peer, handle, ended)

    def poll(self, agent: Any, peer: str, handle: Any) -> bool:
        if agent is not self._agent:
            raise TransferError("the read belongs to an agent that was replaced", peer=peer)
        with self._translated(peer):
            return _ended(agent.check_xfer_state(handle), peer)

    def handle(self, agent: Any, peer: str, lists: tuple[Any, Any], parts: range) -> Any:
        with self._translated(peer):
            return agent.make_prepped_xfer("READ", lists[0], list(parts), lists[1], list(parts))

    def forget(self, agent: Any, peer: str) -> None:
        """The last user of a remote agent disconnects it."""
        with self._lock:
            if agent is not self._agent or peer not in self._peers:
                return
            self._peers[peer] -= 1
            if self._peers[peer] == 0:
                del self._peers[peer]
                with self._translated(peer):
                    agent.remove_remote_agent(peer)

    def close(self) -> None:
        with self._lock:
            agent, self._agent = self._agent, None
            peers, self._peers = list(self._peers), {}
            memory, self._memory, self._registration = self._memory, [], None
            if agent is None:
                return
            for peer in peers:  # before exit, or the other side waits for us
                with self._translated(peer):
                    agent.remove_remote_agent(peer)
            if memory:
                with self._translated(agent.name):
                    agent.deregister_memory(agent.get_reg_descs(memory))

    @contextmanager
    def _translated(self, peer: str) -> Iterator[None]:
        try:
            yield
        except self._faults as error:
            kind = PeerUnavailable if "DISCONNECT" in str(error) or "NOT_FOUND" in str(error) else TransferError
            raise kind(f"NIXL refused a call that concerns {peer} ({error}): use another holder", peer=peer) from error


class _NixlPeer:
    """A transfer handle per piece, made when it is first read. `parts`: the entries of both lists that it moves."""

    def __init__(self, transport: NixlTransport, agent: Any, name: str, lists: tuple[Any, Any], parts: tuple[range, ...], sizes: tuple[int, ...]) -> None:
        self._transport, self._agent, self._name, self._lists, self._parts, self._sizes = transport, agent, name, lists, parts, sizes
        self._handles: dict[int, Any] = {}

    def read(self, piece: int) -> Transfer:
        if piece not in self._handles:
            self._handles[piece] = self._transport.handle(self._agent, self._name, self._lists, self._parts[piece])
        return self._transport.post(self._agent, self._name, self._handles[piece], self._sizes[piece])

    def close(self) -> None:
        self._transport.forget(self._agent, self._name)


class _NixlTransfer:
    def __init__(self, transport: NixlTransport, agent: Any, peer: str, handle: Any, ended: bool) -> None:
        self._transport, self._agent, self._peer, self._handle, self.at_once = transport, agent, peer, handle, ended

    def done(self) -> bool:
        return self.at_once or self._transport.poll(self._agent, self._peer, self._handle)


def _ended(state: str, peer: str) -> bool:
    if state == "ERR":
        raise TransferError(f"a NIXL read from {peer} failed: the holder is gone or its memory is not registered", peer=peer)
    return state == "DONE"


@contextmanager
def waiting_for_events(api: Any) -> Iterator[None]:
    """NIXL's Python class fixes the progress thread's wait at 0: it then polls without end and takes a core of every process that holds weights.

    With a wait it sleeps until the fabric signals an event, so reads are as fast. No argument reaches that field, hence the detour, one thread at a time:
    two would put each other's detour back.
    """
    module: Any = importlib.import_module(api.nixl_agent.__module__)
    with _DETOUR:
        bindings: Any = module.nixlBind

        class Config(bindings.nixlAgentConfig):  # type: ignore[misc]  # a class of a binary module
            def __setattr__(self, name: str, value: Any) -> None:
                super().__setattr__(name, EVENT_WAIT_MICROSECONDS if name == "pthrDelay" else value)

        module.nixlBind = _Overlay(bindings, Config)
        try:
            yield
        finally:
            module.nixlBind = bindings


class _Overlay:
    """The bindings with one class replaced."""

    def __init__(self, bindings: Any, config: Any) -> None:
        self._bindings, self.nixlAgentConfig = bindings, config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bindings, name)


def _load(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise SpecError(f"{HINT} ({error})") from error


def _fault_types(api: Any) -> tuple[type[Exception], ...]:
    """NIXL's bindings raise one class per status, without a base of their own."""
    with _DETOUR:
        bindings = vars(api.nixlBind)
    found = [value for name, value in bindings.items() if name.endswith("Error") and isinstance(value, type) and issubclass(value, Exception)]
    return (*found, RuntimeError, ValueError)


def _parameters(settings: TransportSettings, own: Sequence[str] = ()) -> tuple[dict[str, str], dict[str, str]]:
    """(NIXL's init parameters, what they set as the environment variables that would override or be overridden)."""
    if settings.backend != "UCX":
        return ({"device_list": ", ".join(settings.devices)} if settings.devices else {}), {}
    engine, shadows = list(own), {}
    if settings.tls:
        engine.append(f"TLS={','.join(settings.tls)}")
        shadows["UCX_TLS"] = ",".join(settings.tls)
    if settings.rails is not None:
        engine.append(f"MAX_RMA_RAILS={settings.rails}")
        shadows["UCX_MAX_RMA_RAILS"] = str(settings.rails)
    parameters = {"engine_config": ",".join(engine)} if engine else {}
    if settings.devices:
        parameters["device_list"] = ", ".join(settings.devices)
        shadows["UCX_NET_DEVICES"] = ",".join(settings.devices)
    return parameters, shadows
