"""Plans by their key: the document and its layouts come from the catalog, the plan is worked out here, once for each key.

Every rank of both sides plans from the same document, so a plan is proven complete where it is used, before any byte moves (O7).
`made` counts plans: a warm round makes none.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from refit_api.errors import EngineMismatch, WireMismatch
from refit_api.wire import GetLayout, GroupRef

from refit_runtime.plan.key import PlanDocument, plan_document, plan_key
from refit_runtime.plan.plan import Plan
from refit_runtime.ports import Catalog

KEPT = 2  # the present plan and the one before it, which the served version may still have


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan with the document that it was made from."""

    key: str
    document: PlanDocument
    plan: Plan

    def class_of(self, coordinate: str, layout: str) -> str:
        """The engine class that has this layout at this coordinate."""
        for class_, coordinates in self.document.classes.items():
            if coordinates.get(coordinate) == layout:
                return class_
        raise EngineMismatch(
            f"plan {self.key[:12]} has no engine class that needs at {coordinate} what this rank needs: the version is older than this class; "
            "the next published version has it",
            seen=layout,
        )


class Planner:
    """Safe to share between threads."""

    def __init__(self, catalog: Catalog, group: GroupRef) -> None:
        self._catalog, self._group = catalog, group
        self._known: dict[str, Planned] = {}
        self._layouts: dict[str, bytes] = {}
        self._lock = threading.Lock()
        self.made = 0

    def own(self, layout: str, blob: bytes) -> None:
        """What this process knows already is not fetched."""
        self._layouts[layout] = blob

    def planned(self, key: str) -> Planned:
        """Raises PlanError if the layouts of the group do not fit each other."""
        with self._lock:
            found = self._known.get(key)
            if found is None:
                found = self._known[key] = self._make(key)
                for old in list(self._known)[:-KEPT]:
                    del self._known[old]
            return found

    def _make(self, key: str) -> Planned:
        document = PlanDocument.decode(self._fetch(key))
        if plan_key(document) != key:
            raise WireMismatch("the catalog's plan document has another key: run one release of Refit everywhere", seen=plan_key(document), expected=key)
        fetched: dict[str, bytes] = {}

        def layout(name: str) -> bytes:
            if name not in fetched:
                fetched[name] = self._layouts.get(name) or self._fetch(name)
            return fetched[name]

        plan = plan_document(document, layout)
        self.made += 1
        return Planned(key, document, plan)

    def _fetch(self, name: str) -> bytes:
        return self._catalog.get_layout(GetLayout(self._group, name))
