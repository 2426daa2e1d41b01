"""A real API server that judges documents without keeping them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from kubernetes.client import ApiException, CustomObjectsApi
from refit_api import names
from refit_api.document import JsonObject, table, tables


@dataclass(frozen=True)
class Refusal:
    """One cause of a refusal, as the API server tells it."""

    field: str
    message: str


@dataclass(frozen=True)
class Judge:
    """What the API server says to a document: nothing where it accepts, else the causes. Nothing is kept but by `create`."""

    api: CustomObjectsApi
    api_group: str = names.GROUP

    def creating(self, document: JsonObject) -> list[Refusal]:
        return self._asked(lambda: self.api.create_namespaced_custom_object(*self._where(document), document, dry_run="All", field_validation="Strict"))

    def changing(self, document: JsonObject, change: JsonObject) -> list[Refusal]:
        """With a merge patch, on top of what is stored under the document's name."""
        name = table(document, "metadata")["name"]
        return self._asked(lambda: self.api.patch_namespaced_custom_object(*self._where(document), name, change, dry_run="All", field_validation="Strict"))

    def create(self, document: JsonObject) -> JsonObject:
        made: JsonObject = self.api.create_namespaced_custom_object(*self._where(document), document, field_validation="Strict")
        return made

    def delete(self, document: JsonObject) -> None:
        self.api.delete_namespaced_custom_object(*self._where(document), table(document, "metadata")["name"])

    def _where(self, document: JsonObject) -> tuple[str, str, str, str]:
        return self.api_group, names.VERSION, "default", f"{str(document['kind']).lower()}s"

    @staticmethod
    def _asked(call: Callable[[], object]) -> list[Refusal]:
        try:
            call()
        except ApiException as error:
            if error.status == 404:  # not JSON where the kind is not served yet
                return [Refusal("", str(error.body))]
            answer: JsonObject = json.loads(error.body)
            causes = tables(table(answer, "details"), "causes")
            return [Refusal(str(cause.get("field", "")), str(cause["message"])) for cause in causes] or [Refusal("", str(answer["message"]))]
        return []
