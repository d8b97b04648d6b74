"""The benchmarks are scripts, not a package: their folder goes onto the path, as Python itself does for a script."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
