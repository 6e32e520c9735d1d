"""What tests share: models, worlds, fakes, and where things are."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]  # of the repository
# Of a child that finds this checkout, and what our own PYTHONPATH has.
PYTHON_PATH = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
DATA = ROOT / "tests" / "data"
# Whether tests whose worth lies in repetition repeat: `scripts/test --nightly`.
IS_NIGHTLY = bool(os.environ.get("TUNERD_NIGHTLY_TESTS"))
