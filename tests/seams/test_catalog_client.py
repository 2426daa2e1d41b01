"""The catalog client against the real server: TLS, rotated tokens and CAs, typed refusals, big layouts, and never a hang."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from refit_api.errors import CatalogUnavailable, Denied, SpecError, TransferTimeout, VersionRetired
from refit_api.mounted import Group, Model
from refit_api.wire import PROTOCOL, Blob, GetLayout, ListVersions, Registered, RegisterWorker, Role, WorkerRef
from refit_operator.catalog.local import LocalCatalog, local_catalog
from refit_runtime.adapters.catalog import GrpcCatalog
from refit_runtime.adapters.clock import SystemClock
from refit_runtime.control import ControlClient
from refit_runtime.settings import Pod, RuntimeSettings


@pytest.fixture
def client(catalog_server: LocalCatalog, tmp_path: Path) -> Iterator[Callable[[], GrpcCatalog]]:
    (tmp_path / "ca").write_bytes(catalog_server.ca)
    (tmp_path / "token").write_text(catalog_server.admit(Role.TRAINER, "pod-1"))
    with ExitStack() as stack:

        def make() -> GrpcCatalog:
            made = GrpcCatalog(catalog_server.address, str(tmp_path / "ca"), str(tmp_path / "token"))
            stack.callback(made.close)
            return made

        yield make


def registered(catalog: GrpcCatalog, server: LocalCatalog, layout: str = "", uid: str = "pod-1") -> Registered:
    worker = WorkerRef(uid, Role.TRAINER, 0, "start-1")
    return catalog.register(RegisterWorker(PROTOCOL, server.group, worker, 1, layout or "0" * 64, run_id="run-1"))


def test_a_layout_of_many_frames_comes_back_whole(client: Any, catalog_server: LocalCatalog) -> None:
    catalog = client()
    data = bytes(range(256)) * 12_000
    name = hashlib.sha256(data).hexdigest()
    assert registered(catalog, catalog_server, name).want_layout
    catalog.put_layout(Blob(catalog_server.group, name, data))
    assert catalog.get_layout(GetLayout(catalog_server.group, name)) == data
    assert not registered(catalog, catalog_server, name).want_layout


def test_the_token_is_read_for_each_call(client: Any, catalog_server: LocalCatalog, tmp_path: Path) -> None:
    """The kubelet replaces it while we run."""
    catalog = client()
    registered(catalog, catalog_server)
    good = (tmp_path / "token").read_text()
    (tmp_path / "token").write_text("expired")
    with pytest.raises(Denied):
        catalog.list_versions(ListVersions(catalog_server.group))
    (tmp_path / "token").write_text(good)
    assert catalog.list_versions(ListVersions(catalog_server.group)).versions == ()


def test_who_speaks_for_another_pod_is_denied(client: Any, catalog_server: LocalCatalog) -> None:
    with pytest.raises(Denied, match="another worker"):
        registered(client(), catalog_server, uid="pod-2")


def test_a_rotated_ca_is_taken_up(client: Any, catalog_server: LocalCatalog, tmp_path: Path) -> None:
    with local_catalog() as other:
        (tmp_path / "ca").write_bytes(other.ca)
    catalog = client()
    with pytest.raises(CatalogUnavailable):
        registered(catalog, catalog_server)
    (tmp_path / "ca").write_bytes(catalog_server.ca)
    with pytest.raises(CatalogUnavailable):
        registered(catalog, catalog_server)  # finds the new file
    assert registered(catalog, catalog_server).group_key


def test_nobody_there_is_said_soon_and_again_after_it_is_back(tmp_path: Path) -> None:
    with local_catalog() as server:
        (tmp_path / "ca").write_bytes(server.ca)
        (tmp_path / "token").write_text("t")
        address = server.address
    catalog = GrpcCatalog(address, str(tmp_path / "ca"), str(tmp_path / "token"))
    start = time.monotonic()
    with pytest.raises(CatalogUnavailable) as caught:
        catalog.list_versions(ListVersions(server.group))
    catalog.close()
    assert caught.value.retry_after is not None
    assert time.monotonic() - start < 8
    with pytest.raises(CatalogUnavailable, match="closed"):
        catalog.list_versions(ListVersions(server.group))


def test_a_missing_token_says_what_to_mount(client: Any, catalog_server: LocalCatalog, tmp_path: Path) -> None:
    catalog = client()
    (tmp_path / "token").unlink()
    with pytest.raises(SpecError, match="projected token volume"):
        catalog.list_versions(ListVersions(catalog_server.group))


@pytest.fixture
def control(client: Any, catalog_server: LocalCatalog) -> ControlClient:
    group = catalog_server.group
    settings = RuntimeSettings(
        group=Group(namespace=group.namespace, name=group.name),
        model=Model(name="m"),
        catalog=catalog_server.address,
        pod=Pod(name="p", uid="pod-1", namespace=group.namespace, ip="127.0.0.1"),
    )
    return ControlClient(settings, client(), SystemClock())


def test_an_orchestrator_waits_with_a_deadline(control: ControlClient) -> None:
    assert control.list() == ()
    with pytest.raises(TransferTimeout, match="step 3 of run r"):
        control.create("r", 3, 0.3)
    with pytest.raises(VersionRetired, match="unknown"):
        control.wait_ready(7, 1.0)


async def test_the_same_for_asyncio(control: ControlClient) -> None:
    assert await control.aio.list() == ()
    with pytest.raises(TransferTimeout):
        await asyncio.wait_for(control.aio.create("r", 3, 0.3), 10)
