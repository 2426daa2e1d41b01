"""What goes wrong with a cluster, said to the person at the terminal.

Not part of `refit_api.errors`: that tree is what the product says to its users, this one what the test bench says to its own.
"""

from __future__ import annotations


class ClusterError(RuntimeError):
    """The message says what was tried, what was seen and the command or setting that helps."""
