"""One command in a process of its own, for the run of a recipe.

The first line of standard input is JSON: the command's name, its settings by field as texts, and
whether it prints one document. The process ends with its standard input.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from importlib import import_module

from tunerd.cli.errors import reported
from tunerd.errors import ExitCode
from tunerd.system.without_torch import keep_torch_from_tvm


def main() -> None:
    """Call the command that standard input names, and end with its exit code."""
    faulthandler.enable()  # native code that crashes shows where it was called
    request = json.loads(sys.stdin.buffer.readline())
    _end_with_stdin()
    keep_torch_from_tvm()
    with reported(as_json=request["json"]):
        from tunerd.settings.option import checked, with_environment
        from tunerd.settings.studies import COMMANDS
        from tunerd.system import logs

        logs.set_up(verbose=False, as_json=os.environ.get("TUNERD_LOG_FORMAT") == "json")
        name = request["command"]
        model = COMMANDS[name]
        settings = checked(model, with_environment(model, request["settings"]), from_text=True)
        command = getattr(import_module(f"tunerd.cli.{name}"), name)
        sys.exit(command(settings, json=request["json"]))


def _end_with_stdin() -> None:
    """Have this process end, at once, when its standard input does; its children get an empty one.

    Whoever started it was killed then. What it has stored goes on, as after a kill of its own.
    """
    from tunerd.system.spawn import end_with

    leash = os.dup(0)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    end_with(leash, ExitCode.INTERRUPTED)


if __name__ == "__main__":
    main()
