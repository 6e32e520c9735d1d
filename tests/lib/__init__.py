"""What tests share: models, worlds, fakes, and where things are."""

from pathlib import Path

ROOT = Path(__file__).parents[2]  # of the repository
DATA = ROOT / "tests" / "data"
