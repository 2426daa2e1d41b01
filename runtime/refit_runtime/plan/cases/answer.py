"""The answer to a case: exit code and JSON, as `docs/reference/case-files.md` states them.

0 ok    1 wrong: bytes moved, but not to where they belong (a bug of ours)    2 invalid: the file itself    3 refused: no correct plan
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from refit_api.errors import InvalidCase, PlanError, RefitError
from refit_api.tensors import CoordinateNeeds, Dtype

from refit_runtime.plan.cases.file import Case, read_case
from refit_runtime.plan.cases.layout import RankMemory, coordinate_needs, trainer_memory
from refit_runtime.plan.cases.move import CLASS, Moved, memory_to_move, move
from refit_runtime.plan.key import PlanDocument, encode_needs, encode_shards, layout_hash, plan_key
from refit_runtime.plan.plan import Plan, plan

OK, WRONG, INVALID, REFUSED = 0, 1, 2, 3

MOST_READS = 1 << 22  # of --run: each is a step of a loop


@dataclass(frozen=True, slots=True)
class Planned:
    """A case with its plan, if it has one; `error` says why it has none."""

    code: int
    case: Case | None = None
    plan: Plan | None = None
    key: str = ""
    memory: tuple[RankMemory, ...] = ()
    coordinates: tuple[CoordinateNeeds, ...] = ()
    error: RefitError | None = None


def no_casts(tensor: Dtype, parameter: Dtype) -> bool:
    """The cast rule of cases: they state where bytes go, not what an engine makes of them."""
    return tensor == parameter


def plan_case(content: bytes) -> Planned:
    try:
        case = read_case(content)
    except InvalidCase as error:
        return Planned(INVALID, error=error)
    try:
        memory = trainer_memory(case.trainer)
        coordinates = coordinate_needs(case)
        shards = [each.shards() for each in memory]
        found = plan(shards, {CLASS: coordinates}, case.redundancy, case.subset, no_casts)
    except PlanError as error:
        return Planned(REFUSED, case, error=error)
    layouts = {each.rank: layout_hash(encode_shards(each)) for each in shards}
    needs = {each.id: layout_hash(encode_needs(each)) for each in coordinates}
    key = plan_key(PlanDocument(layouts, {CLASS: needs}, case.redundancy))
    return Planned(OK, case, found, key, memory, coordinates)


def run_case(planned: Planned, memory: int) -> Moved:
    """`memory`: bytes that the machine has. Raises InvalidCase for a case that is too large to be moved on it."""
    assert planned.case is not None
    assert planned.plan is not None
    needed, reads = memory_to_move(planned.plan, planned.memory, planned.coordinates), descriptors(planned.case, planned.plan)
    advice = "make sizes smaller to move it (layouts stay the same), or plan without --run"
    too_large = InvalidCase(f"--run: this case needs about {needed} bytes of memory, the machine has {memory} or less: {advice}", field="", line=0)
    if needed > memory:
        raise too_large
    if reads > MOST_READS:
        raise InvalidCase(f"--run: {reads} reads of {planned.case.chunk_bytes} bytes, at most {MOST_READS}: raise chunkBytes, {advice}", field="", line=0)
    try:
        return move(planned.case, planned.plan, planned.memory, planned.coordinates)
    except MemoryError:
        raise too_large from None


def as_json(planned: Planned, moved: Moved | None = None) -> tuple[int, dict[str, Any]]:
    """Exit code and the answer of `--json`."""
    if planned.error is not None:
        return planned.code, {"verdict": "invalid" if planned.code == INVALID else "refused", "error": _error(planned.error)}
    assert planned.plan is not None
    assert planned.case is not None
    found = planned.plan
    answer: dict[str, Any] = {
        "verdict": "ok",
        "planKey": planned.key,
        "coordinates": {each.id: _coordinate(found, each.id) for each in planned.coordinates},
        "sources": {str(each.rank): {"arenaBytes": found.source_bytes(each.rank)} for each in planned.memory},
        "descriptors": descriptors(planned.case, found),
    }
    if moved is None:
        return OK, answer
    answer["params"] = {id_: {name: _sha256(content.tobytes()) for name, content in params.items()} for id_, params in moved.params.items()}
    answer["memory"] = {str(rank): _sha256(content) for rank, content in sorted(moved.memory.items()) if content}
    if moved.right:
        return OK, answer
    return WRONG, {**answer, "verdict": "wrong"}


def descriptors(case: Case, found: Plan) -> int:
    """Reads that all coordinates together post: the chunks of their runs."""
    return sum(len(run.needers) * -(-run.bytes // case.chunk_bytes) for run in found.runs)


def _coordinate(found: Plan, id_: str) -> dict[str, Any]:
    runs = [found.runs[run] for run in found.coordinate_runs(CLASS, id_)]
    return {
        "bytes": sum(run.bytes for run in runs),
        "arenaBytes": found.coordinate_bytes(CLASS, id_),
        "runs": [{"source": run.owners[0], "bytes": run.bytes, "atoms": run.atoms} for run in runs],
    }


def _error(error: RefitError) -> dict[str, Any]:
    found: dict[str, Any] = {"type": type(error).__name__, "message": error.message}
    for name in ("tensor", "field") if "tensor" in error.facts else ("coordinate", "param", "field"):
        if name in error.facts:
            found[name] = error.facts[name]
    if "line" in error.facts:
        found["line"] = int(error.facts["line"])
    for name in ("missing", "doubled"):
        if name in error.facts:
            found[name] = json.loads(error.facts[name])
    return found


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
