"""What this code needs, checked before anything else of it is imported: it travels with checkpoints, unseen by pip.

The lowest versions are those of the package's own metadata. Older ones would end in an `ImportError` about some inner name.
"""

import importlib
import re

LOWEST = {"torch": "2.9", "transformers": "5.24"}


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.match(r"[\d.]*\d", version)[0].split("."))


def check_requirements(lowest: dict[str, str] = LOWEST) -> None:
    """Raise `ImportError`, naming package, version found, version wanted and remedy, unless all `lowest` are met."""
    for package, wanted in lowest.items():
        found = importlib.import_module(package).__version__
        if _release(found) < _release(wanted):
            raise ImportError(
                f"Atlas models need {package}>={wanted}, but {package} {found} is installed: "
                f"pip install --upgrade '{package}>={wanted}'"
            )


check_requirements()
