"""The wheel of this checkout, built once per content: images, and so pods, never run an editable install."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import tomllib

from e2e.cluster.processes import call
from e2e.cluster.progress import step
from e2e.cluster.settings import REPOSITORY

BUILD_SECONDS = 300.0


def source_key(repository: Path = REPOSITORY) -> str:
    """Hash of everything that goes into the wheel."""
    project = tomllib.loads((repository / "pyproject.toml").read_text())
    folders = [repository / package for package in project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]]
    files = [file for folder in folders for file in folder.rglob("*") if file.is_file() and "__pycache__" not in file.parts]
    digest = hashlib.sha256()
    for file in sorted([*files, *(repository / name for name in ("pyproject.toml", "README.md", "LICENSE"))]):
        digest.update(f"{file.relative_to(repository)}\0{file.stat().st_size}\0".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def build_wheel(cache: Path) -> Path:
    place = cache / "wheels" / source_key()
    if not place.exists():
        unfinished = place.with_suffix(".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        with step("build the wheel", 5):
            call(["uv", "build", "--quiet", "--wheel", "--out-dir", unfinished, REPOSITORY], seconds=BUILD_SECONDS)
        unfinished.rename(place)
    return next(place.glob("refit-*.whl"))
