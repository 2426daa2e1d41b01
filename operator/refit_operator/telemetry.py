"""Logs and metrics of the operator. Only `__main__` calls `configure`; labels never carry pod names.

Group labels are bounded: their series are removed with the group.
"""

from __future__ import annotations

import logging
import sys

import structlog
from prometheus_client import Counter, Gauge, Histogram

RECONCILE_SECONDS = Histogram("refit_reconcile_duration_seconds", "One pass over one group.", buckets=(0.005, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 5, 30))
RECONCILE_ERRORS = Counter("refit_reconcile_errors_total", "Passes that failed, by error.", ["error"])
QUEUE_AGE = Histogram("refit_queue_age_seconds", "How long after its time a group's pass began.", buckets=(0.01, 0.05, 0.2, 1, 5, 30, 120))
STATUS_WRITES = Counter("refit_status_writes_total", "Status writes, by kind; urgent ones are those that somebody waits for.", ["kind", "pace"])
STATUS_COALESCED = Counter("refit_status_writes_coalesced_total", "Status changes that waited for the next write.", ["kind"])
REQUESTS = Counter("refit_apiserver_requests_total", "Requests to the API server.", ["verb", "code"])
WATCH_SEEN = Gauge(
    "refit_watch_last_event_timestamp_seconds", "When a watch last showed something; its age in a busy cluster says whether it is blind.", ["resource"]
)
GENERATORS = Gauge("refit_generators", "Generators of a group, by state.", ["namespace", "group", "state"])
TARGET = Gauge("refit_version_target", "The version that generators are sent to.", ["namespace", "group"])
CURRENT = Gauge("refit_version_current", "The newest version that at least minAvailable generators serve.", ["namespace", "group"])
REJECTED = Gauge("refit_versions_rejected", "Versions that were taken back and still have a WeightVersion.", ["namespace", "group"])
CONVERGENCE = Histogram("refit_version_convergence_seconds", "From Ready to served everywhere.", buckets=(0.1, 0.5, 1, 2, 5, 10, 30, 60, 300, 1800))
LEASES = Gauge("refit_leases", "Leases on the versions of a group.", ["namespace", "group"])
DEPTH = Gauge("refit_tree_depth", "Hops from the trainers to the last generator.", ["namespace", "group"])

STATES = ("ready", "staged", "atTarget", "lagging", "failed", "fenced")


def configure(level: str) -> None:
    """JSON lines on stderr, from structlog and from libraries alike."""
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.ExtraAdder()],
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.format_exc_info,
                structlog.processors.JSONRenderer(default=str),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    for chatty in ("kopf", "aiohttp.access"):  # a line for every event seen and every probe answered
        logging.getLogger(chatty).setLevel(max(logging.WARNING, root.level))


def forget(namespace: str, group: str) -> None:
    """Removes the series of a group that is gone."""
    for gauge in (TARGET, CURRENT, REJECTED, LEASES, DEPTH):
        _remove(gauge, namespace, group)
    for state in STATES:
        _remove(GENERATORS, namespace, group, state)


def _remove(gauge: Gauge, *labels: str) -> None:
    try:
        gauge.remove(*labels)
    except KeyError:  # never set
        return
