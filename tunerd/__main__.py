"""`python -m tunerd`: the command line where the script is not on the PATH."""

from __future__ import annotations

from tunerd.cli import main

if __name__ == "__main__":
    main()
