"""Manifests between pods: gRPC over TLS with a self-signed certificate for each process, pinned by readers, who sign with the group key.

The certificate is made at start, registered in the catalog with the endpoint and never written to disk. A reader gets the endpoint and
the certificate from the catalog, so it reaches exactly the process that registered; the holder answers only who knows the group key.
"""

from __future__ import annotations

import hmac
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import Any

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from refit_api import codec
from refit_api.errors import Denied, PeerUnavailable, RefitError, SpecError, WireMismatch
from refit_api.wire import Endpoint, GetManifest, Manifest, ManifestRun, Source

from refit_runtime.adapters import rpc
from refit_runtime.ports import ManifestAnswer

NAME = "worker.refit.dev"  # what every certificate says; the pin is the identity
_METHOD = codec.MANIFEST_METHODS["GetManifest"]


class GrpcManifests:
    """`host` is the pod's address; port 0 takes a free one."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._key = b""
        self._lock = threading.Lock()
        self._server: grpc.Server | None = None
        self._channels: dict[Endpoint, tuple[grpc.Channel, Callable[..., Any]]] = {}

    def serve(self, answer: ManifestAnswer) -> Endpoint:
        key, certificate = _certificate()
        server = grpc.server(futures.ThreadPoolExecutor(4, "refit-manifests"), options=(("grpc.so_reuseport", 0),))
        handler = grpc.unary_stream_rpc_method_handler(
            lambda request, context: self._answer(answer, request, context),
            request_deserializer=lambda data: codec.decode(GetManifest, data),
            response_serializer=codec.encode,
        )
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(codec.MANIFESTS_SERVICE, {"GetManifest": handler}),))
        address = f"[{self._host}]:{self._port}" if ":" in self._host else f"{self._host}:{self._port}"
        try:
            port = server.add_secure_port(address, grpc.ssl_server_credentials([(key, certificate)]))
        except RuntimeError as error:
            raise SpecError(f"manifests cannot be served at {address}: the port is in use; change workerPort, or stop who uses it", port=self._port) from error
        server.start()
        self._server = server
        return Endpoint(self._host, port, certificate.decode())

    def admit(self, group_key: bytes) -> None:
        self._key = group_key

    def _answer(self, answer: ManifestAnswer, request: GetManifest, context: grpc.ServicerContext) -> Iterator[Manifest]:
        try:
            if not self._key or not hmac.compare_digest(request.mac, _mac(self._key, request)):
                raise Denied("the request is not signed with this group's key: only members of the group get manifests")
            yield from _split(answer(request))
        except RefitError as error:
            context.set_trailing_metadata(((codec.ERROR_METADATA, codec.encode_error(error)),))
            context.abort(grpc.StatusCode[codec.status_of(error)], error.message)

    def fetch(self, source: Source, request: GetManifest, timeout: float) -> Manifest:
        call = self._stub(source.endpoint)
        try:
            frames: list[Manifest] = list(rpc.messages(call(replace(request, mac=_mac(self._key, request)), timeout=timeout), PeerUnavailable))
        except PeerUnavailable:
            self._forget(source.endpoint)
            raise
        if not frames or frames[0].holder != source.worker:
            seen = frames[0].holder if frames else "nothing"
            raise WireMismatch(
                f"{source.endpoint.host}:{source.endpoint.port} sent the manifest of another holder: ask the catalog again", seen=seen, expected=source.worker
            )
        return replace(frames[0], runs=tuple(run for frame in frames for run in frame.runs))

    def _stub(self, endpoint: Endpoint) -> Callable[..., Any]:
        with self._lock:
            if endpoint not in self._channels:
                credentials = grpc.ssl_channel_credentials(endpoint.certificate.encode())
                options = (*rpc.OPTIONS, ("grpc.ssl_target_name_override", NAME))
                channel = grpc.secure_channel(f"{endpoint.host}:{endpoint.port}", credentials, options=options)
                self._channels[endpoint] = channel, rpc.stubs(channel, codec.MANIFEST_METHODS)["GetManifest"]
            return self._channels[endpoint][1]

    def _forget(self, endpoint: Endpoint) -> None:
        with self._lock:
            known = self._channels.pop(endpoint, None)
        if known is not None:
            known[0].close()

    def close(self) -> None:
        for endpoint in list(self._channels):
            self._forget(endpoint)
        if self._server is not None:
            self._server.stop(grace=0.5).wait(5)


def _mac(key: bytes, request: GetManifest) -> bytes:
    return hmac.digest(key, codec.encode(replace(request, mac=b"")), "sha256")


def _split(manifest: Manifest) -> Iterator[Manifest]:
    """Frames of about half a MiB; only the first carries the agent's metadata."""
    frame = replace(manifest, runs=())
    runs: list[ManifestRun] = []
    size = 0
    for run in manifest.runs:
        if runs and size + len(run.digests) + len(run.pieces) > rpc.FRAME_BYTES:
            yield replace(frame, runs=tuple(runs))
            frame, runs, size = replace(frame, metadata=b""), [], 0
        runs.append(run)
        size += len(run.digests) + len(run.pieces) + 64
    yield replace(frame, runs=tuple(runs))


def _certificate() -> tuple[bytes, bytes]:
    """(key, certificate), both PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, NAME)])
    now = datetime.now(timezone.utc)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=3650))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(NAME)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return private, certificate.public_bytes(serialization.Encoding.PEM)
