"""The API server's answers as the error tree: who acts, and when it is tried again."""

from __future__ import annotations

import pytest
from refit_api.errors import Denied, PeerUnavailable, RefitError, SpecError
from refit_operator.kube import Refused, translated


@pytest.mark.parametrize(
    ("refusal", "becomes", "retry_after"),
    [
        pytest.param(Refused(400, "BadRequest", 'strict decoding error: unknown field "spec.x"', None), SpecError, None, id="an unknown field"),
        pytest.param(Refused(422, "Invalid", "spec.replicas: Invalid value", None), SpecError, None, id="a bad value"),
        pytest.param(Refused(500, "", "failed to create typed patch object (demo): field not declared", None), SpecError, None, id="server-side apply's 500"),
        pytest.param(Refused(403, "Forbidden", "exceeded quota: pods", None), SpecError, None, id="quota"),
        pytest.param(Refused(403, "Forbidden", "admission webhook denied the request", None), SpecError, None, id="a policy of the cluster"),
        pytest.param(
            Refused(403, "Forbidden", "unable to create new content in namespace a because it is being terminated", None),
            PeerUnavailable,
            5.0,
            id="a namespace that ends",
        ),
        pytest.param(Refused(403, "Forbidden", 'User "x" cannot patch resource "pods"', None), Denied, 30.0, id="a right that is missing"),
        pytest.param(Refused(401, "Unauthorized", "", None), Denied, 30.0, id="an expired token"),
        pytest.param(Refused(409, "Conflict", "the object has been modified", None), PeerUnavailable, None, id="a conflict"),
        pytest.param(Refused(429, "TooManyRequests", "too many requests", 3.0), PeerUnavailable, 3.0, id="too many requests: as long as it says"),
        pytest.param(Refused(500, "InternalError", "etcdserver: request timed out", None), PeerUnavailable, None, id="a server in trouble"),
        pytest.param(Refused(503, "ServiceUnavailable", "", 1.0), PeerUnavailable, 1.0, id="a server that starts"),
    ],
)
def test_answers(refusal: Refused, becomes: type[RefitError], retry_after: float | None) -> None:
    error = translated(refusal)
    assert type(error) is becomes
    assert error.retry_after == retry_after
    assert refusal.message in error.message
