"""The command line: a file per command."""

from __future__ import annotations

import sys


def main() -> None:
    """Run `tunerd` with the arguments of this process."""
    from tunerd.cli.app import app
    from tunerd.cli.errors import run
    from tunerd.without_torch import keep_torch_from_tvm

    keep_torch_from_tvm()
    sys.exit(run(app, sys.argv[1:]))
