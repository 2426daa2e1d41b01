"""The cluster's own certificate authority, its certificates and the kubeconfigs made of them.

Everybody is known by certificate: common name = user, organization = group, as Kubernetes reads them.
The lifetime is long and there is no renewal: these clusters live for a day, and `down` takes their keys along.
Invariant: private keys and kubeconfigs are readable by their owner only.
"""

from __future__ import annotations

import base64
import datetime
import ipaddress
import json
import os
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

LIFETIME = datetime.timedelta(days=3650)
ADMINISTRATORS = "system:masters"


@dataclass(frozen=True, slots=True)
class Subject:
    """Who a certificate is for; with `names` or `addresses` it also serves TLS there."""

    user: str
    groups: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    addresses: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class KeyPair:
    certificate: bytes
    key: bytes = field(repr=False)

    def write(self, folder: Path, name: str) -> None:
        write_private(folder / f"{name}.key", self.key)
        (folder / f"{name}.crt").write_bytes(self.certificate)

    @staticmethod
    def read(folder: Path, name: str) -> KeyPair:
        return KeyPair((folder / f"{name}.crt").read_bytes(), (folder / f"{name}.key").read_bytes())


@dataclass(frozen=True, slots=True)
class Authority:
    pair: KeyPair

    @staticmethod
    def create(now: datetime.datetime) -> Authority:
        key = ec.generate_private_key(ec.SECP256R1())
        name = _name(Subject("refit-cluster-ca"))
        builder = _builder(name, name, key.public_key(), now).add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        return Authority(KeyPair(_pem(builder.sign(key, hashes.SHA256())), _private(key)))

    def issue(self, subject: Subject, now: datetime.datetime) -> KeyPair:
        signer = serialization.load_pem_private_key(self.pair.key, password=None)
        assert isinstance(signer, ec.EllipticCurvePrivateKey)
        key = ec.generate_private_key(ec.SECP256R1())
        issuer = x509.load_pem_x509_certificate(self.pair.certificate).subject
        usages = [ExtendedKeyUsageOID.CLIENT_AUTH]
        builder = _builder(_name(subject), issuer, key.public_key(), now)
        if subject.names or subject.addresses:
            usages.append(ExtendedKeyUsageOID.SERVER_AUTH)
            served = [*map(x509.DNSName, subject.names), *(x509.IPAddress(ipaddress.ip_address(address)) for address in subject.addresses)]
            builder = builder.add_extension(x509.SubjectAlternativeName(served), critical=False)
        builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        return KeyPair(_pem(builder.sign(signer, hashes.SHA256())), _private(key))


def _name(subject: Subject) -> x509.Name:
    groups = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, group) for group in subject.groups]
    return x509.Name([*groups, x509.NameAttribute(NameOID.COMMON_NAME, subject.user)])


def _builder(name: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, now: datetime.datetime) -> x509.CertificateBuilder:
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(issuer).public_key(key).serial_number(x509.random_serial_number())
    return builder.not_valid_before(now - datetime.timedelta(hours=1)).not_valid_after(now + LIFETIME)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())


def write_private(path: Path, content: bytes) -> None:
    """A reader sees the old content or the new one, never a part."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    unfinished.touch(mode=0o600)
    unfinished.write_bytes(content)
    unfinished.replace(path)


def write_authority(folder: Path, subjects: dict[str, Subject], now: datetime.datetime) -> Authority:
    """The authority in `folder` with a key pair per subject and the key that signs service account tokens; what is there stays."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not (folder / "ca.crt").exists():
        Authority.create(now).pair.write(folder, "ca")
    authority = Authority(KeyPair.read(folder, "ca"))
    for name, subject in subjects.items():
        if not (folder / f"{name}.crt").exists():
            authority.issue(subject, now).write(folder, name)
    if not (folder / "service-accounts.pub").exists():
        key = ec.generate_private_key(ec.SECP256R1())
        write_private(folder / "service-accounts.key", _private(key))
        public = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
        (folder / "service-accounts.pub").write_bytes(public)
    return authority


def kubeconfig(url: str, authority: Authority, user: str, pair: KeyPair) -> bytes:
    """Self-contained: no paths in it, so it can be copied anywhere."""
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "refit", "cluster": {"server": url, "certificate-authority-data": _encode(authority.pair.certificate)}}],
        "users": [{"name": user, "user": {"client-certificate-data": _encode(pair.certificate), "client-key-data": _encode(pair.key)}}],
        "contexts": [{"name": "refit", "context": {"cluster": "refit", "user": user}}],
        "current-context": "refit",
    }
    return json.dumps(document, indent=1).encode()


def _encode(content: bytes) -> str:
    return base64.b64encode(content).decode()
