"""The catalog's CA in its Secret: made once, renewed without breaking anybody, never trusted blindly."""

from __future__ import annotations

import base64
import datetime as dt
from dataclasses import dataclass, field
from typing import Any

import pytest
from refit_api.errors import SpecError
from refit_operator.authority import ensure, read
from refit_operator.catalog.certificates import AUTHORITY_DAYS, make_authority
from refit_operator.ports import Manifest

NOW = dt.datetime(2026, 12, 1, tzinfo=dt.timezone.utc)


@dataclass
class Memory:
    """Twin of `ports.Secrets`."""

    secrets: dict[str, dict[str, Any]] = field(default_factory=dict)
    writes: int = 0

    async def read_secret(self, namespace: str, name: str) -> Manifest | None:
        return self.secrets.get(name)

    async def write_secret(self, manifest: Manifest) -> None:
        self.writes += 1
        self.secrets[manifest["metadata"]["name"]] = {**manifest, "metadata": {**manifest["metadata"], "resourceVersion": str(self.writes)}}


async def test_made_once() -> None:
    secrets = Memory()
    first = await ensure(secrets, "ns", "ca", NOW)
    assert await ensure(secrets, "ns", "ca", NOW) == first
    assert secrets.writes == 1


async def test_renewed_and_the_old_one_stays_trusted_while_it_is_valid() -> None:
    secrets = Memory()
    first = await ensure(secrets, "ns", "ca", NOW)
    second = await ensure(secrets, "ns", "ca", NOW + dt.timedelta(days=AUTHORITY_DAYS * 0.8))
    assert second.signing != first.signing
    assert second.bundle.count("BEGIN CERTIFICATE") == 2
    assert first.bundle in second.bundle
    third = await ensure(secrets, "ns", "ca", NOW + dt.timedelta(days=AUTHORITY_DAYS * 1.6))
    assert first.bundle not in third.bundle


@pytest.mark.parametrize("field", ["ca.crt", "ca.key", ""])
async def test_a_secret_that_holds_something_else_is_named_and_not_shown(field: str) -> None:
    secrets = Memory()
    await ensure(secrets, "ns", "ca", NOW)
    secret = {**secrets.secrets["ca"]}
    if field:
        secret["data"] = {**secret["data"], field: base64.b64encode(b"hunter2").decode()}
    else:
        secret["data"] = {**secret["data"], "ca.key": base64.b64encode(make_authority("other", NOW).key).decode()}
    with pytest.raises(SpecError, match="Secret ns/ca") as caught:
        read(secret)
    assert "hunter2" not in str(caught.value)
