"""The quickstart works as it is written: the commands of the page, in order, in one shell. What `make` does is done here already."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from e2e.cluster.settings import REPOSITORY
from e2e.example import NAMESPACE
from e2e.installation import Installation
from e2e.kubectl import KubectlError

BLOCKS = re.findall(r"```sh\n(.*?)```", (REPOSITORY / "docs" / "quickstart.md").read_text(), re.DOTALL)
MOST_SECONDS = 900.0


@pytest.mark.story
def test_the_commands_of_the_quickstart(installation: Installation, tmp_path: Path) -> None:
    """`kubectl wait` among them judges; the namespace is gone at the end."""
    commands = [line for block in BLOCKS for line in block.splitlines() if not line.startswith("make ")]
    assert len(commands) > 10
    script, log = tmp_path / "quickstart.sh", tmp_path / "log"
    script.write_text("\n".join(commands).replace("example.yaml", str(tmp_path / "example.yaml")))
    with log.open("w") as output:
        try:
            done = subprocess.run(["bash", "-euxo", "pipefail", str(script)], cwd=REPOSITORY, stdout=output, stderr=output, timeout=MOST_SECONDS, check=False)
        finally:
            left = _namespace_is_there(installation)
            installation.kubectl("delete", "namespace", NAMESPACE, "--ignore-not-found", "--wait=false")
    assert done.returncode == 0, log.read_text()
    assert not left


def _namespace_is_there(installation: Installation) -> bool:
    try:
        installation.kubectl("get", "namespace", NAMESPACE)
    except KubectlError as error:
        if "NotFound" in error.stderr:
            return False
        raise
    return True
