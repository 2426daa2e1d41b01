"""A deadline for what is awaited. `asyncio.wait_for` may swallow a cancellation that comes with the answer (until Python 3.12), and then nothing ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def within(seconds: float, work: Awaitable[T]) -> T:
    """Raises asyncio.TimeoutError; the work is cancelled then, and when the caller is."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait((task,), timeout=seconds)
        if not task.done():
            raise asyncio.TimeoutError
        return task.result()
    finally:
        task.cancel()
