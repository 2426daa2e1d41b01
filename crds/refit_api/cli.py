"""`refit`: a dispatcher over the entry-point group `refit.commands`; a command whose extra is missing says how to install it."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points

import typer

from refit_api import __version__

_EXTRAS = {"refit_runtime": "runtime", "refit_operator": "operator"}


def _usage(names: list[str]) -> str:
    return f"refit {__version__}\nusage: refit COMMAND [ARGUMENTS]\ncommands: {', '.join(names)}\n`refit COMMAND --help` explains one"


def main(arguments: list[str] | None = None) -> None:
    """Exit codes are the command's own; 2 for a command that does not exist or cannot be loaded."""
    argv = sys.argv[1:] if arguments is None else arguments
    commands = {point.name: point for point in entry_points(group="refit.commands")}
    name = argv[0] if argv else "--help"
    if name in ("-h", "--help", "--version"):
        print(_usage(sorted(commands)))
        return
    if name not in commands:
        print(f"refit: no command {name!r}\n{_usage(sorted(commands))}", file=sys.stderr)
        sys.exit(2)
    point = commands[name]
    try:
        command = point.load()
    except ModuleNotFoundError as missing:
        extra = _EXTRAS.get(point.value.split(".")[0], "runtime")
        print(f"refit {name}: the package {missing.name!r} is missing; pip install 'refit[{extra}]'", file=sys.stderr)
        sys.exit(2)
    if isinstance(command, typer.Typer):
        command(argv[1:], prog_name=f"refit {name}")
    else:
        command(argv[1:])


if __name__ == "__main__":
    main()
