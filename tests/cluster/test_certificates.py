"""Kubernetes reads who somebody is from a certificate: common name and organizations must arrive, and only servers may serve."""

from __future__ import annotations

import datetime
import json
import stat
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from e2e.cluster.certificates import Authority, KeyPair, Subject, kubeconfig, write_authority

NOW = datetime.datetime(2026, 5, 1, tzinfo=datetime.UTC)


def test_user_and_groups_arrive_in_the_certificate() -> None:
    authority = Authority.create(NOW)
    certificate = x509.load_pem_x509_certificate(authority.issue(Subject("system:node:n1", ("system:nodes", "other")), NOW).certificate)
    assert [name.value for name in certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)] == ["system:node:n1"]
    assert [name.value for name in certificate.subject.get_attributes_for_oid(NameOID.ORGANIZATION_NAME)] == ["system:nodes", "other"]
    certificate.verify_directly_issued_by(x509.load_pem_x509_certificate(authority.pair.certificate))


@pytest.mark.parametrize(
    ("subject", "serves"),
    [
        pytest.param(Subject("client"), False, id="a client certificate cannot serve"),
        pytest.param(Subject("server", names=("localhost",)), True, id="a name makes a server"),
        pytest.param(Subject("server", addresses=("10.77.0.1",)), True, id="an address makes a server"),
    ],
)
def test_only_what_has_a_place_may_serve(subject: Subject, serves: bool) -> None:
    certificate = x509.load_pem_x509_certificate(Authority.create(NOW).issue(subject, NOW).certificate)
    usage = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert (ExtendedKeyUsageOID.SERVER_AUTH in usage) is serves


def test_a_second_start_keeps_every_key(tmp_path: Path) -> None:
    subjects = {"admin": Subject("admin")}
    write_authority(tmp_path / "keys", subjects, NOW)
    before = {file.name: file.read_bytes() for file in (tmp_path / "keys").iterdir()}
    write_authority(tmp_path / "keys", subjects | {"late": Subject("late")}, NOW)
    after = {file.name: file.read_bytes() for file in (tmp_path / "keys").iterdir()}
    assert before.items() <= after.items()
    assert set(after) - set(before) == {"late.crt", "late.key"}


def test_private_keys_are_for_their_owner_only(tmp_path: Path) -> None:
    write_authority(tmp_path / "keys", {"admin": Subject("admin")}, NOW)
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "keys").glob("*.key")}
    assert modes == dict.fromkeys(("ca.key", "admin.key", "service-accounts.key"), 0o600)


def test_a_key_pair_is_not_shown() -> None:
    assert "secret" not in repr(KeyPair(b"public", b"secret"))


def test_a_kubeconfig_names_no_files() -> None:
    authority = Authority.create(NOW)
    document = json.loads(kubeconfig("https://10.77.0.1:6443", authority, "admin", authority.issue(Subject("admin"), NOW)))
    assert document["clusters"][0]["cluster"].keys() == {"server", "certificate-authority-data"}
    assert document["users"][0]["user"].keys() == {"client-certificate-data", "client-key-data"}
