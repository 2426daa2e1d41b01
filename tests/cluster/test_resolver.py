"""Which cluster is taken: never somebody's own unless it is named, and an impossible wish says what is missing."""

from __future__ import annotations

import dataclasses

import pytest

from e2e.cluster.errors import ClusterError
from e2e.cluster.resolver import Facts, choose

ALL = Facts(kind=True, docker=True, linux=True, root=True, go=True)
NO_DOCKER = dataclasses.replace(ALL, docker=False)
MAC = dataclasses.replace(ALL, linux=False)
NOTHING = Facts(kind=False, docker=False, linux=False, root=False, go=False)


@pytest.mark.parametrize(
    ("wanted", "facts", "chosen"),
    [
        pytest.param("auto", ALL, "kind", id="kind before the local cluster"),
        pytest.param("auto", NO_DOCKER, "local", id="kind without docker is no kind"),
        pytest.param("auto", MAC, "kind", id="elsewhere than on Linux only kind is left"),
        pytest.param("local", ALL, "local", id="a wish goes first"),
        pytest.param("existing", NOTHING, "existing", id="an existing cluster needs nothing here"),
    ],
)
def test_choice(wanted: str, facts: Facts, chosen: str) -> None:
    assert choose(wanted, facts) == chosen


@pytest.mark.parametrize(
    ("wanted", "facts", "said"),
    [
        pytest.param("auto", NOTHING, ["the program kind", "Linux", "root", "Go", "REFIT_CLUSTER=existing"], id="nothing works"),
        pytest.param("kind", NO_DOCKER, ["kind needs a running docker"], id="kind without docker"),
        pytest.param("local", dataclasses.replace(ALL, root=False), ["local needs root"], id="local without root"),
    ],
)
def test_what_is_missing_is_named(wanted: str, facts: Facts, said: list[str]) -> None:
    with pytest.raises(ClusterError) as raised:
        choose(wanted, facts)
    assert [part for part in said if part not in str(raised.value)] == []
