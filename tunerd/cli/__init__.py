"""The command line: a file per command."""

from __future__ import annotations

import atexit
import gc
import sys


def main() -> None:
    """Run `tunerd` with the arguments of this process."""
    from tunerd.errors import ExitCode

    try:
        from tunerd.cli.app import app
        from tunerd.cli.errors import run
    except ModuleNotFoundError as missing:
        if str(missing.name).partition(".")[0] == "tunerd":
            raise
        print(
            f"tunerd: the module {missing.name} is missing, as where tunerd was installed with "
            "--no-deps to serve artifacts; commands need what pip installs without that flag",
            file=sys.stderr,
        )
        sys.exit(ExitCode.HOST_NOT_CAPABLE)
    from tunerd.system.without_torch import keep_torch_from_tvm

    keep_torch_from_tvm()
    # At its end Python looks for garbage among all that was imported, a third of a second.
    atexit.register(gc.freeze)
    sys.exit(run(app, sys.argv[1:]))
