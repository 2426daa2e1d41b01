"""The control plane. It needs Python 3.11 (task groups, deadlines that survive cancellation); the distribution also serves hosts with 3.10, for the runtime."""

import sys

if sys.version_info < (3, 11):
    raise ImportError(f"refit_operator needs Python 3.11 or newer, this is {sys.version.split()[0]}; only refit_runtime and refit_api work with 3.10")
