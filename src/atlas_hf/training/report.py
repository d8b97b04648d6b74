"""Results as JSON that every reader takes."""

import json
import math


def to_json(value) -> str:
    """Indented JSON; what is infinite or not a number, which JSON has no name for, becomes null."""
    return json.dumps(_finite(value), indent=1, allow_nan=False) + "\n"


def _finite(value):
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
