"""A YAML file in place of flags: the same names with underscores, and what a flag gives on the command line goes first."""

import argparse
from pathlib import Path

import yaml

from atlas_hf.training.errors import InputError


def read_config(path: Path, parser: argparse.ArgumentParser) -> dict:
    """Values for the arguments of `parser` from a YAML file, checked as the flags are.

    Fields of mappings (`set`, `trainer`) are given as a mapping. Relative paths are relative to the working directory.

    Raises:
        InputError: no such file, no mapping in it, a name that is no flag, or a value that the flag refuses.
    """
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"config {path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"config {path} is not YAML: {error}") from error
    if not isinstance(values, dict):
        raise InputError(f"config {path} must hold a mapping of names to values, such as `max_steps: 500`")
    actions = {action.dest: action for action in parser._actions if action.dest not in ("help", "config")}
    unknown = [name for name in values if name not in actions]
    if unknown:
        raise InputError(
            f"config {path} has unknown name(s) {', '.join(map(str, unknown))}: the names are {', '.join(sorted(actions))}"
        )
    return {name: _checked(actions[name], value, path) for name, value in values.items() if value is not None}


def _checked(action: argparse.Action, value, path: Path):
    if isinstance(action, argparse._AppendAction):
        if not isinstance(value, dict):
            raise InputError(f"config {path}: {action.dest}={value!r} must be a mapping of fields to values")
        return [(field, _number(text)) for field, text in value.items()]
    if isinstance(action, argparse._StoreTrueAction):
        if not isinstance(value, bool):
            raise InputError(f"config {path}: {action.dest}={value!r} must be true or false")
        return value
    if action.nargs in ("+", "*"):
        return [_converted(action, one, path) for one in (value if isinstance(value, list) else [value])]
    return _converted(action, value, path)


def _number(value):
    """YAML takes `1e-3`, without a point, for a string."""
    try:
        return float(value) if isinstance(value, str) and "e" in value.lower() else value
    except ValueError:
        return value


def _converted(action: argparse.Action, value, path: Path):
    if isinstance(value, dict | list | bool):
        raise InputError(f"config {path}: {action.dest}={value!r} must be a single value")
    try:
        value = action.type(str(value)) if action.type else str(value)
    except (argparse.ArgumentTypeError, ValueError) as error:
        raise InputError(f"config {path}: {action.dest}: {error}") from error
    if action.choices is not None and value not in action.choices:
        raise InputError(f"config {path}: {action.dest}={value!r} is none of {', '.join(map(str, action.choices))}")
    return value
