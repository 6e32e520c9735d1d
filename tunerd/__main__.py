"""`python -m tunerd`: the command line where the script is not on the PATH."""

from __future__ import annotations

import faulthandler

from tunerd.cli import main

if __name__ == "__main__":
    faulthandler.enable()  # native code that crashes the driver shows where it was called
    main()
