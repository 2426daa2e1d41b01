"""Settings of the example programs, from the environment of their pods. Refit's own settings come in its mounted file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

Settings = TypeVar("Settings", bound=BaseSettings)


def read(kind: type[Settings]) -> Settings:
    """From the environment; ends the program with one line where a variable is wrong or missing."""
    try:
        return kind()
    except ValidationError as error:
        prefix = kind.model_config.get("env_prefix", "")
        wrong = "; ".join(f"{prefix}{str(each['loc'][0]).upper()}: {each['msg']}" for each in error.errors(include_url=False))
        raise SystemExit(f"environment: {wrong}. {(kind.__doc__ or '').strip()}") from error


class TrainerProgram(BaseSettings):
    """`TRAINER_*`: how long and how fast to train. A version is published before the first optimiser step and after every `steps`."""

    model_config = SettingsConfigDict(env_prefix="TRAINER_", frozen=True, extra="forbid")

    versions: Annotated[int, Field(ge=1)] = 5
    steps: Annotated[int, Field(ge=1)] = 4
    """Optimiser steps between two versions."""
    interval_seconds: Annotated[float, Field(ge=0)] = 5.0
    """At least so long between two versions."""
    publish_patience_seconds: Annotated[float, Field(gt=0)] = 600.0
    """How long to go on asking when no engine is there yet or the catalog is away."""
    learning_rate: Annotated[float, Field(gt=0)] = 2e-3
    seed: int = 0
    scale: Annotated[int, Field(ge=1)] = 1
    """`TinyLlama.scaled`, the same as the engines'."""
    export: Path | None = None
    """A folder for a Hugging Face checkpoint of every version, `<export>/<version>`."""
    allowed: Path | None = None
    """A file with a number: how many versions may be published so far. Without it, all."""
    counters: Path | None = None
    """A file that the plain trainer writes after each version: what its client counted so far, as JSON."""


class Launched(BaseSettings):
    """RANK and WORLD_SIZE are what torchrun tells each process that it starts: start this program with it."""

    model_config = SettingsConfigDict(frozen=True, extra="ignore")

    rank: int
    world_size: int


class EngineProgram(BaseSettings):
    """`ENGINE_*`: the light engine. `fused`: it keeps query, key and value, and gate and up, in one parameter each, as fast engines do."""

    model_config = SettingsConfigDict(env_prefix="ENGINE_", frozen=True, extra="forbid")

    host: str = "0.0.0.0"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    fused: bool = False
    scale: Annotated[int, Field(ge=1)] = 1
    """`TinyLlama.scaled`, the same as the trainer's."""


class RawProgram(BaseSettings):
    """`RAW_*`: one end of a raw read."""

    model_config = SettingsConfigDict(env_prefix="RAW_", frozen=True, extra="forbid")

    bytes: Annotated[int, Field(ge=1)]
    """How much memory is offered and filled."""
    host: str = "0.0.0.0"
    port: Annotated[int, Field(ge=0, le=65535)] = 9000
