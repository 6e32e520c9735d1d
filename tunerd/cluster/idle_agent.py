"""Stands where an agent of Ray would: says that it serves nothing, and waits for its raylet's end.

A node of Ray begins once its two agents have written their ports into the session's folder. Each
takes half a second to a second of a core until then. In a private cluster nobody asks them: no
page is served, no metric scraped, no runtime environment made. This file is run as a script, with
the arguments of the agent before whose script it stands; it imports nothing that takes time.
"""

import os
import sys
import time

UNUSED = -1  # what Ray's own agent writes for a service that it does not have
_LOOK_SECS = 1.0


def main() -> None:
    """Write the port files of argv[1], names with commas, and wait; the rest are an agent's."""
    parent = os.getppid()
    given = dict(
        word[2:].split("=", 1) for word in sys.argv[2:] if word.startswith("--") and "=" in word
    )
    for name in sys.argv[1].split(","):
        path = os.path.join(given["session-dir"], f"{name}_{given['node-id']}")
        with open(f"{path}.new", "w") as file:
            file.write(str(UNUSED))
        os.replace(f"{path}.new", path)
    while os.getppid() == parent:
        time.sleep(_LOOK_SECS)


if __name__ == "__main__":
    main()
