"""One distribution, two extras: with one of them alone, its whole package imports. Host libraries (torch, vLLM, Megatron, NIXL) are never there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from e2e.cluster.wheel import build_wheel

ROOT = Path(__file__).parents[2]
OF_THE_HOST = ("torch", "triton", "vllm", "megatron", "nixl", "transformers", "starlette", "fastapi", "msgspec")
IMPORT_ALL = f"""
import importlib, pkgutil, sys
names = []
for package in sys.argv[1:]:
    found = importlib.import_module(package)
    names += [package, *(module.name for module in pkgutil.walk_packages(found.__path__, package + "."))]
for name in names:
    if name.endswith("__main__"):
        continue
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if ".adapters." not in name or (error.name or "").split(".")[0] not in {OF_THE_HOST}:
            raise
print(len(names))
"""


@pytest.mark.parametrize(("extra", "package"), [("operator", "refit_operator"), ("runtime", "refit_runtime")])
def test_the_wheel_with_one_extra_imports_that_whole_package(extra: str, package: str, tmp_path: Path) -> None:
    wheel, python = build_wheel(tmp_path / "built"), tmp_path / "environment" / "bin" / "python"
    for command in (
        ["uv", "venv", "--quiet", "--python", sys.executable, python.parents[1]],
        ["uv", "pip", "install", "--quiet", "--python", python, f"{wheel}[{extra}]", "-r", ROOT / "requirements" / f"{extra}.txt"],
    ):
        subprocess.run([str(part) for part in command], check=True, timeout=300)
    done = subprocess.run([python, "-I", "-c", IMPORT_ALL, "refit_api", package], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 20
