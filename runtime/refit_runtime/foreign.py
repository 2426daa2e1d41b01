"""Errors that are not ours: given a name, and told with their stack.

Never with the values of variables, as a log's own rendering of exceptions adds them: secrets may be among them, and in a pause there is no time for it.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import structlog
from refit_api.errors import RefitError

log = structlog.get_logger(__name__)


def stack(error: BaseException) -> str:
    return "".join(traceback.format_exception(type(error), error, error.__traceback__))


@contextmanager
def named(work: str, kind: type[RefitError] = RefitError) -> Iterator[None]:
    """What no error of ours was made for, such as memory that ran out, is one afterwards."""
    try:
        yield
    except RefitError:
        raise
    except Exception as error:
        log.error("failed by an error that is not ours", work=work, stack=stack(error))  # noqa: TRY400  see above
        raise kind(f"the {work} failed ({type(error).__name__}: {error}): the log of the rank says where") from error
