"""The Secret that holds the catalog's certificate authority: made once, renewed at two thirds of its life.

Pods get all certificates of the Secret that are still valid, so a renewal breaks nobody. Keys are never logged. Time is an argument.
"""

from __future__ import annotations

import base64
import datetime as dt
from dataclasses import dataclass

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key
from refit_api import names
from refit_api.errors import SpecError

from refit_operator.catalog.certificates import Pair, make_authority, renew_after
from refit_operator.ports import Manifest, Secrets

_CERTIFICATES, _KEY = "ca.crt", "ca.key"


@dataclass(frozen=True, slots=True)
class Authority:
    """`signing` makes certificates from now on; `bundle` is what pods trust (PEM): its certificate first, then older ones."""

    signing: Pair
    bundle: str


async def ensure(secrets: Secrets, namespace: str, name: str, now: dt.datetime) -> Authority:
    """The CA of the Secret: made if there is none, renewed when it is old. PeerUnavailable when another one wrote it first: read it again."""
    found = await secrets.read_secret(namespace, name)
    older: tuple[bytes, ...] = ()
    if found is not None:
        authority = read(found)
        if now < renew_after(authority.signing):
            return authority
        older = _valid(authority.bundle, now)
    signing = make_authority(f"{names.GROUP} catalog", now)
    made = Authority(signing, b"".join((signing.certificate, *older)).decode())
    await secrets.write_secret(_secret(namespace, name, made, found))
    return made


def read(secret: Manifest) -> Authority:
    """Raises SpecError that names the Secret, never what is in it."""
    place = f"{secret['metadata']['namespace']}/{secret['metadata']['name']}"
    fault = f"Secret {place} holds no CA in {_CERTIFICATES} with its {_KEY}: delete it, and a new one is made"
    try:
        data = {field: base64.b64decode(secret["data"][field]) for field in (_CERTIFICATES, _KEY)}
        first = x509.load_pem_x509_certificates(data[_CERTIFICATES])[0]
        matches = load_pem_private_key(data[_KEY], None).public_key() == first.public_key()
    except (KeyError, ValueError, TypeError) as error:
        raise SpecError(fault) from error
    if not matches:
        raise SpecError(fault)
    return Authority(Pair(first.public_bytes(Encoding.PEM), data[_KEY]), data[_CERTIFICATES].decode())


def _valid(bundle: str, now: dt.datetime) -> tuple[bytes, ...]:
    certificates = x509.load_pem_x509_certificates(bundle.encode())
    return tuple(c.public_bytes(Encoding.PEM) for c in certificates if c.not_valid_after_utc > now)


def _secret(namespace: str, name: str, authority: Authority, found: Manifest | None) -> Manifest:
    metadata = {"name": name, "namespace": namespace, "labels": {"app.kubernetes.io/managed-by": names.FIELD_MANAGER}}
    if found is not None:
        metadata["resourceVersion"] = found["metadata"]["resourceVersion"]
    data = {_CERTIFICATES: authority.bundle.encode(), _KEY: authority.signing.key}
    encoded = {field: base64.b64encode(value).decode() for field, value in data.items()}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "type": "Opaque", "data": encoded}
