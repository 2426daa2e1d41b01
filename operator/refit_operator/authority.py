"""The catalog's certificate authority: made once, kept in a Secret, renewed at two thirds of its life.

Invariants:
- pods get the bundle of all CAs that are still valid, so a renewal breaks nobody: the certificate of before stays trusted until it expires;
- the server's certificate is made at start and lives in memory only; it never outlives its CA;
- keys are never logged. Time is an argument.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from refit_api import names
from refit_api.errors import SpecError

from refit_operator.ports import Manifest, Secrets

CA_LIFE = timedelta(days=365)
SERVER_LIFE = timedelta(days=90)
_SKEW = timedelta(minutes=5)
_CERTIFICATES, _KEY = "ca.crt", "ca.key"


@dataclass(frozen=True, slots=True)
class Authority:
    """`certificates`: the signing one first, then older ones that are still valid (PEM)."""

    certificates: tuple[bytes, ...]
    key: bytes

    @property
    def bundle(self) -> str:
        return b"".join(self.certificates).decode()

    def renew_at(self) -> datetime:
        return _two_thirds(x509.load_pem_x509_certificate(self.certificates[0]))


@dataclass(frozen=True, slots=True)
class KeyPair:
    certificate: bytes
    key: bytes

    def renew_at(self) -> datetime:
        return _two_thirds(x509.load_pem_x509_certificate(self.certificate))


def make(older: Sequence[bytes], now: datetime) -> Authority:
    """A new CA that signs from now on; of the older ones those that are still valid stay trusted."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{names.GROUP} catalog CA")])
    usage = x509.KeyUsage(True, False, False, False, False, True, True, False, False)
    built = _builder(name, name, key, now, now + CA_LIFE).add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    certificate = built.add_extension(usage, critical=True).sign(key, hashes.SHA256())
    valid = [pem for pem in older if x509.load_pem_x509_certificate(pem).not_valid_after_utc > now]
    return Authority((certificate.public_bytes(Encoding.PEM), *valid), _pem(key))


def issue(authority: Authority, hosts: Sequence[str], now: datetime) -> KeyPair:
    """A server certificate for these DNS names."""
    issuer = x509.load_pem_x509_certificate(authority.certificates[0])
    signer = load_pem_private_key(authority.key, None)
    assert isinstance(signer, ec.EllipticCurvePrivateKey), "read() accepts no other"
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, hosts[0][:64])])
    until = min(now + SERVER_LIFE, issuer.not_valid_after_utc)
    built = (
        _builder(name, issuer.subject, key, now, until)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(host) for host in hosts]), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    )
    return KeyPair(built.sign(signer, hashes.SHA256()).public_bytes(Encoding.PEM), _pem(key))


async def ensure(secrets: Secrets, namespace: str, name: str, now: datetime) -> Authority:
    """The CA of the Secret: made if it is not there, renewed when it is old. Who loses a race to write it reads what the other wrote, next time."""
    found = await secrets.read_secret(namespace, name)
    authority = read(found) if found is not None else None
    if authority is not None and now < authority.renew_at():
        return authority
    made = make(authority.certificates if authority is not None else (), now)
    await secrets.write_secret(_secret(namespace, name, made, found))
    return made


def read(secret: Manifest) -> Authority:
    """Raises SpecError that names the Secret, never what is in it."""
    place = f"Secret {secret['metadata']['namespace']}/{secret['metadata']['name']}"
    try:
        data = {field: base64.b64decode(secret["data"][field]) for field in (_CERTIFICATES, _KEY)}
        certificates = x509.load_pem_x509_certificates(data[_CERTIFICATES])
        key = load_pem_private_key(data[_KEY], None)
    except (KeyError, ValueError, TypeError) as error:
        raise SpecError(f"{place} does not hold a CA in {_CERTIFICATES} and {_KEY}: delete it, and the operator makes a new one") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificates[0].public_key():
        raise SpecError(f"{place}: {_KEY} does not belong to the first certificate of {_CERTIFICATES}: delete it, and the operator makes a new one")
    return Authority(tuple(c.public_bytes(Encoding.PEM) for c in certificates), data[_KEY])


def _secret(namespace: str, name: str, authority: Authority, found: Manifest | None) -> Manifest:
    metadata = {"name": name, "namespace": namespace, "labels": {"app.kubernetes.io/managed-by": names.FIELD_MANAGER}}
    if found is not None:
        metadata["resourceVersion"] = found["metadata"]["resourceVersion"]
    data = {_CERTIFICATES: b"".join(authority.certificates), _KEY: authority.key}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata,
        "type": "Opaque",
        "data": {field: base64.b64encode(value).decode() for field, value in data.items()},
    }


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, now: datetime, until: datetime) -> x509.CertificateBuilder:
    public = key.public_key()
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(until)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    )


def _two_thirds(certificate: x509.Certificate) -> datetime:
    start, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    return start + (end - start) * 2 / 3


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def moment(now: float) -> datetime:
    return datetime.fromtimestamp(now, timezone.utc)
