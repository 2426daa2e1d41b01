"""One contract for every transport: what is read is what was there, a replaced agent's reads never land, a warm round registers nothing."""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from refit_api.errors import PeerError, PeerUnavailable, SpecError, TransferError
from refit_api.mounted import TransportSettings
from refit_api.wire import Manifest, Role, WorkerRef
from refit_runtime.adapters import nixl as nixl_adapter
from refit_runtime.adapters.clock import SystemClock
from refit_runtime.adapters.host_memory import HostMemory, free_bytes
from refit_runtime.adapters.memory import Fabric, Fault, FaultyTransport, MemoryTransport
from refit_runtime.adapters.nixl import NixlTransport
from refit_runtime.ports import Peer, Read, Transfer, Transport

MIB = 1 << 20
HOLDER = WorkerRef("source-pod", Role.TRAINER, 0, "i1")
KINDS = ["memory", "wrapped", "nixl"]


def make(kind: str, fabric: Fabric, faults: dict[str, Fault] | None = None) -> Transport:
    match kind:
        case "memory":
            return MemoryTransport(fabric)
        case "wrapped":
            return FaultyTransport(MemoryTransport(fabric), faults or {}, SystemClock())
        case _:
            return NixlTransport(TransportSettings(), {})


@pytest.fixture(params=KINDS)
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Transport, Transport, torch.Tensor, torch.Tensor]]:
    fabric, memory = Fabric(), HostMemory()
    source, reader = make(request.param, fabric), make(request.param, fabric)
    there, here = (memory.allocate(4 * MIB, torch.device("cpu")) for _ in range(2))
    there.copy_(torch.randint(0, 256, (4 * MIB,), dtype=torch.uint8))
    here.zero_()
    source.register(there)
    reader.register(here)
    yield source, reader, there, here
    reader.close()
    source.close()


def manifest(source: Transport, offset: int = 0) -> Manifest:
    at = source.registration()
    return Manifest(HOLDER, 1, "plan", at.agent, at.metadata, at.base + offset, at.device, at.memory, ())


def finish(transfer: Transfer, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not transfer.done():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def keep_reading(peer: Peer) -> None:
    for _ in range(200):
        finish(peer.read(0))
        time.sleep(0.02)


def test_pieces_arrive_where_they_belong(pair: Any) -> None:
    source, reader, there, here = pair
    peer = reader.connect(manifest(source, MIB), [Read(0, 2 * MIB, MIB), Read(MIB + 256, 0, 512)])
    for transfer in [peer.read(0), peer.read(1)]:
        finish(transfer)
    assert torch.equal(here[2 * MIB : 3 * MIB], there[MIB : 2 * MIB])
    assert torch.equal(here[:512], there[2 * MIB + 256 : 2 * MIB + 768])
    assert not here[512 : 2 * MIB].any()
    peer.close()


def test_a_piece_may_lie_in_several_places_of_several_regions(pair: Any) -> None:
    """As live weights do: addresses are absolute, and one read moves all, each part to its place."""
    source, reader, there, here = pair
    more = HostMemory().allocate(MIB, torch.device("cpu"))
    more.copy_(torch.randint(0, 256, (MIB,), dtype=torch.uint8))
    source.register(there, more)
    parts = ((there.data_ptr() + MIB, MIB, 512), (more.data_ptr() + 100, 3 * MIB, 36), (there.data_ptr(), MIB + 512, 4))
    peer = reader.connect(replace(manifest(source), base=0), [Read(parts[0][0], MIB, 552, parts), Read(more.data_ptr(), 0, 1000)])
    for transfer in [peer.read(0), peer.read(1)]:
        finish(transfer)
    assert torch.equal(here[MIB : MIB + 516], torch.cat([there[MIB : MIB + 512], there[:4]]))
    assert torch.equal(here[3 * MIB : 3 * MIB + 36], more[100:136])
    assert not here[MIB + 516 : 3 * MIB].any()
    assert not here[3 * MIB + 36 :].any()
    assert torch.equal(here[:1000], more[:1000])
    peer.close()


def test_a_warm_round_registers_and_connects_nothing(pair: Any) -> None:
    source, reader, there, here = pair
    peer = reader.connect(manifest(source), [Read(0, 0, MIB)])
    finish(peer.read(0))
    before = reader.counters()
    there[:MIB] += 1
    finish(peer.read(0))
    after = reader.counters()
    assert torch.equal(here[:MIB], there[:MIB])
    assert (after["registrations"], after["connections"]) == (before["registrations"], before["connections"]) == (1, 1)
    assert after["reads"] == 2
    assert after["bytes"] == 2 * MIB


def test_a_replaced_agent_reads_nothing_more(pair: Any) -> None:
    source, reader, _, here = pair
    old = reader.registration().agent
    peer = reader.connect(manifest(source), [Read(0, 0, MIB)])
    reader.register(here)
    assert reader.registration().agent != old
    with pytest.raises((PeerUnavailable, TransferError)):
        finish(peer.read(0))
    assert not here.any()
    peer = reader.connect(manifest(source), [Read(0, 0, MIB)])
    finish(peer.read(0))


def test_a_holder_that_is_gone_is_an_error_and_no_hang(pair: Any) -> None:
    source, reader, _, _ = pair
    said = manifest(source)
    peer = reader.connect(said, [Read(0, 0, MIB)])
    finish(peer.read(0))
    source.close()
    with pytest.raises((PeerError, TransferError)):
        keep_reading(peer)


def test_two_users_of_a_holder_are_one_connection(pair: Any) -> None:
    source, reader, there, here = pair
    first = reader.connect(manifest(source), [Read(0, 0, MIB)])
    second = reader.connect(manifest(source, MIB), [Read(0, MIB, MIB)])
    first.close()
    finish(second.read(0))
    assert torch.equal(here[MIB : 2 * MIB], there[MIB : 2 * MIB])
    if isinstance(reader, NixlTransport):
        assert reader.counters()["connections"] == 1


FAULTS = {
    "corrupt": (Fault(corrupt=1), "flipped"),
    "drop": (Fault(drop=1), "pending"),
    "delay": (Fault(delay=60), "pending"),
    "die at once": (Fault(die_at=0), "error"),
    "die later": (Fault(die_at=MIB), "second error"),
}


@pytest.mark.parametrize(("fault", "outcome"), FAULTS.values(), ids=FAULTS.keys())
def test_faults_on_order(fault: Fault, outcome: str) -> None:
    fabric = Fabric()
    source, reader = make("memory", fabric), make("wrapped", fabric, {"source-pod": fault})
    there, here = torch.ones(2 * MIB, dtype=torch.uint8), torch.zeros(2 * MIB, dtype=torch.uint8)
    source.register(there)
    reader.register(here)
    peer = reader.connect(manifest(source), [Read(0, 0, MIB), Read(MIB, MIB, MIB)])
    transfer = peer.read(0)
    if outcome == "error":
        with pytest.raises(TransferError):
            transfer.done()
        return
    assert transfer.done() is (outcome != "pending")
    assert here[0].item() == {"flipped": 0, "second error": 1}.get(outcome, 0)
    if outcome == "second error":
        with pytest.raises(TransferError):
            peer.read(1).done()


def test_settings_that_the_environment_would_override_are_refused() -> None:
    with pytest.raises(SpecError, match="UCX_TLS is set in the environment"):
        NixlTransport(TransportSettings(tls=("tcp",)), {"UCX_TLS": "rc"})


@pytest.mark.parametrize(
    ("environment", "expected"), [({}, "CUDA_IPC_ENABLE_GET_ZCOPY=on,MAX_RMA_RAILS=1"), ({"UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "n"}, "MAX_RMA_RAILS=1")]
)
def test_devices_of_a_host_read_from_each_other_unless_the_user_says_otherwise(environment: dict[str, str], expected: str) -> None:
    """Without NVLink UCX would read device memory through sockets."""
    transport = NixlTransport(TransportSettings(rails=1), environment)
    assert transport._agent.get_backend_params("UCX")["engine_config"] == expected
    transport.close()


def test_an_agent_after_the_process_group_is_refused() -> None:
    """O1: registration and fabric start-up deadlock with collectives."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(SpecError, match="before Refit's client"):
            NixlTransport(TransportSettings(), {})
    finally:
        torch.distributed.destroy_process_group()


def test_an_arena_that_does_not_fit_is_refused_with_numbers(tmp_path: Any) -> None:
    with pytest.raises(SpecError, match=f"needs {1 << 60} bytes of host memory and"):
        HostMemory().allocate(1 << 60, torch.device("cpu"))
    (tmp_path / "info").write_text("MemTotal: 10 kB\nMemAvailable: 9 kB\n")
    for name, text in {"limit": "5000", "used": "4000", "stat": "inactive_file 1500"}.items():
        (tmp_path / name).write_text(text)
    assert free_bytes(tmp_path / "info", ((*(str(tmp_path / n) for n in ("limit", "used", "stat")), "inactive_file"),)) == 2500


def test_nixl_waits_for_events_instead_of_polling() -> None:
    """A progress thread without a wait takes a core of every process that holds weights, for as long as it lives."""
    api = nixl_adapter._load("nixl._api")
    with nixl_adapter.waiting_for_events(api):
        config = importlib.import_module(api.nixl_agent.__module__).nixlBind.nixlAgentConfig()
        config.pthrDelay = 0
    assert config.pthrDelay == nixl_adapter.EVENT_WAIT_MICROSECONDS


def test_agents_that_are_made_at_once_leave_nixl_as_it_was() -> None:
    """Each puts something in its place for a moment; what NIXL raises would else be taken for a bug, for as long as the process lives."""
    api = nixl_adapter._load("nixl._api")
    bindings, types = api.nixlBind, nixl_adapter._fault_types(api)
    assert "nixlNotFoundError" in {kind.__name__ for kind in types}
    leave = [threading.Event(), threading.Event()]
    entered = threading.Event()

    def make(which: int) -> None:
        with nixl_adapter.waiting_for_events(api):
            entered.set()
            assert leave[which].wait(60)

    with ThreadPoolExecutor() as threads:
        first = threads.submit(make, 0)
        assert entered.wait(60)
        second, seen = threads.submit(make, 1), threads.submit(nixl_adapter._fault_types, api)
        time.sleep(0.2)  # for both to come as far as they can
        leave[0].set()
        first.result(60)
        leave[1].set()
        second.result(60)
        assert seen.result(60) == types
    assert api.nixlBind is bindings
