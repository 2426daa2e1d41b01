"""`refit doctor`: looks at what a pod needs before a refit can work, and says what to do about each thing that is wrong.

Exit codes: 0 all well, 1 something is wrong, 2 the settings cannot be read.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer
from refit_api.errors import RefitError, SpecError
from refit_api.wire import GroupRef, ListVersions
from rich.console import Console
from rich.table import Table

from refit_runtime.settings import RuntimeSettings

command = typer.Typer(add_completion=False)

OK, WRONG = "ok", "wrong"
NIXL_LEAST = (1, 5)


@command.command()
def doctor(
    ranks: Annotated[int, typer.Option(help="Worker processes of this pod: each needs a port.")] = 1,
    running: Annotated[bool, typer.Option("--running", help="The workers run already: their ports must be taken, not free.")] = False,
) -> None:
    """Checks settings, token, NIXL, ports and the catalog of this pod."""
    try:
        settings = RuntimeSettings.load()
    except SpecError as error:
        Console(stderr=True, soft_wrap=True).print(f"settings: {error.message}", markup=False, highlight=False)
        raise typer.Exit(2) from error
    table = Table("check", "result", "seen", title=f"RefitGroup {settings.group.namespace}/{settings.group.name}, pod {settings.pod.name}")
    wrong = 0
    for name, check in checks(settings, ranks, running).items():
        try:
            result, seen = OK, check()
        except RefitError as error:
            result, seen = WRONG, error.message
            wrong += 1
        table.add_row(name, result, seen)
    Console(soft_wrap=True).print(table)
    raise typer.Exit(1 if wrong else 0)


def checks(settings: RuntimeSettings, ranks: int, running: bool) -> dict[str, Callable[[], str]]:
    """Each gives what it saw, or raises what is wrong. In the order in which one depends on the other."""
    return {
        "token": lambda: _readable(settings.token_file, "the projected token volume (audience refit.dev)"),
        "ca": lambda: _readable(settings.ca_file, "the ConfigMap <group>-refit"),
        "nixl": _nixl,
        "transport": lambda: _transport(settings),
        "ports": lambda: _ports(settings, ranks, running),
        "catalog": lambda: _catalog(settings),
    }


def _readable(path: str, what: str) -> str:
    try:
        return f"{path}, {len(Path(path).read_bytes())} bytes"
    except OSError as error:
        raise SpecError(f"{path}: {error.strerror}; mount {what}") from error


def _nixl() -> str:
    try:
        version = metadata.version("nixl")
    except metadata.PackageNotFoundError as error:
        raise SpecError("the package nixl is not installed in this image: pip install nixl (1.5 or newer)") from error
    if tuple(int(part) for part in version.split(".")[:2]) < NIXL_LEAST:
        raise SpecError(f"nixl {version} is too old: 1.5 or newer is needed", seen=version)
    return version


def _transport(settings: RuntimeSettings) -> str:
    """Makes a NIXL agent with this pod's settings, registers a page of memory, and gives it back."""
    import torch

    from refit_runtime.adapters.host_memory import HostMemory
    from refit_runtime.adapters.nixl import NixlTransport

    transport = NixlTransport(settings.transport, settings.ucx)
    try:
        transport.register(HostMemory().allocate(4096, torch.device("cpu")))
        return f"{settings.transport.backend}, metadata of {len(transport.registration().metadata)} bytes, UCX_* set: {', '.join(settings.ucx) or 'none'}"
    finally:
        transport.close()


def _ports(settings: RuntimeSettings, ranks: int, running: bool) -> str:
    wanted = range(settings.worker_port, settings.worker_port + ranks)
    taken = [port for port in wanted if _taken(settings.pod.ip, port)]
    if running:
        missing = sorted(set(wanted) - set(taken))
        if missing:
            raise SpecError(f"nobody serves manifests on port {missing[0]} of {settings.pod.ip}: the worker does not run, or not with this workerPort")
        return f"{len(taken)} served"
    if taken:
        raise SpecError(f"port {taken[0]} of {settings.pod.ip} is in use: change workerPort, or stop who uses it", seen=taken[0])
    return f"{wanted[0]} to {wanted[-1]} free"


def _taken(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.settimeout(2)
        return probe.connect_ex((host, port)) == 0


def _catalog(settings: RuntimeSettings) -> str:
    from refit_runtime.wiring import catalog_of

    catalog = catalog_of(settings)
    try:
        versions = catalog.list_versions(ListVersions(GroupRef(settings.group.namespace, settings.group.name))).versions
    finally:
        catalog.close()
    newest = f", newest {versions[-1].number} is {versions[-1].phase.value}" if versions else ""
    return f"{settings.catalog}: {len(versions)} versions{newest}"
