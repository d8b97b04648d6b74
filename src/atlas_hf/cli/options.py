"""Flags that several commands share, and what they are turned into."""

import argparse
import errno
import json
import os
import shutil
import sys
from pathlib import Path

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoModelForCausalLM, PreTrainedModel

from atlas_hf.modeling.configuration_atlas import PRESETS, SIZES, AtlasConfig
from atlas_hf.training.errors import InputError

HEAD = "lm_head.weight"
# Names of weights that a message lists.
NAMES_SHOWN = 5

# What transformers adds to every configuration says how a model is saved and run, not what it is.
SETTABLE = {*AtlasConfig.__annotations__, *AtlasConfig.attribute_map}

WIDTH_FLAGS = {
    "hidden_size": "model width",
    "num_hidden_layers": "blocks",
    "num_attention_heads": "heads, each with a memory of its own",
    "head_dim": "width of a head's keys and values",
    "intermediate_size": "width of the SwiGLU block",
}


def positive_int(text: str) -> int:
    return _number(text, int, lambda value: value >= 1, "a whole number of at least 1")


def natural(text: str) -> int:
    return _number(text, int, lambda value: value >= 0, "a whole number of at least 0")


def seed(text: str) -> int:
    return _number(text, int, lambda value: 0 <= value < 2**32, "a whole number from 0 to 2^32 - 1")


def positive_float(text: str) -> float:
    return _number(text, float, lambda value: 0 < value < float("inf"), "a number above 0")


def temperature(text: str) -> float:
    # Logits are divided by it: far below this they would no longer be numbers.
    return _number(text, float, lambda value: 1e-6 <= value < float("inf"), "a number of at least 1e-6")


def fraction(text: str) -> float:
    return _number(text, float, lambda value: 0 < value <= 1, "a number above 0 and up to 1")


def _number(text, kind, allowed, wanted):
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or not allowed(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")
    return value


def path(text: str) -> Path:
    if not text:  # a variable that is not set; a path without a name is the folder of work
        raise argparse.ArgumentTypeError("the path is empty: name a file or folder")
    try:
        os.lstat(text)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise argparse.ArgumentTypeError(f"{text[:40]!r}... is no path: {error.strerror}") from error
    return Path(text)


def command_name() -> str:
    """How the user calls this command: by name where the shell finds it, by path in an environment that is not active."""
    name = "atlas-hf"
    called = Path(sys.argv[0])
    return str(called) if shutil.which(name) is None and called.name == name else name


def assignment(text: str) -> tuple[str, object]:
    """`FIELD=VALUE` with the value as JSON where it is JSON, as a string otherwise."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form FIELD=VALUE")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def add_model_arguments(parser: argparse.ArgumentParser, *, defaults: dict | None = None) -> None:
    """Preset, size, widths and single fields of an `AtlasConfig`."""
    defaults = defaults or {}
    group = parser.add_argument_group("model")
    group.add_argument("--preset", choices=PRESETS, default="atlas", help="member of the family")
    group.add_argument("--size", choices=SIZES, help="one of the paper's sizes; the flags below override it")
    for name, meaning in WIDTH_FLAGS.items():
        # Not the flag's own default, which would override --size.
        given = f"{meaning} (without --size: {defaults[name]})" if name in defaults else meaning
        group.add_argument(f"--{name.replace('_', '-')}", type=positive_int, metavar="N", help=given)
    parser.set_defaults(default_widths=defaults)
    group.add_argument(
        "--set",
        type=assignment,
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="any other field of AtlasConfig, e.g. chunk_size=8; may be repeated",
    )


def build_config(arguments: argparse.Namespace, **fields) -> AtlasConfig:
    """The configuration that the flags of `add_model_arguments` describe; `fields` are given by the command itself.

    Raises:
        InputError: the configuration refuses a field or a value.
    """
    widths = {} if arguments.size else dict(arguments.default_widths)
    widths |= {name: getattr(arguments, name) for name in WIDTH_FLAGS if getattr(arguments, name) is not None}
    foreign = [f"{name}={value!r}" for name, value in arguments.set if name not in SETTABLE]
    if foreign:
        raise InputError(
            f"--set gives {', '.join(foreign)}, and AtlasConfig's own fields are {', '.join(sorted(SETTABLE))}: correct or "
            "remove it"
        )
    try:
        given = AtlasConfig.by_own_names(dict(arguments.set))
        return getattr(AtlasConfig, arguments.preset)(arguments.size, **{**fields, **widths, **given})
    except (StrictDataclassError, ValueError, TypeError, AttributeError) as error:
        raise InputError(f"the model's configuration is refused: {innermost(error)}") from error


def innermost(error: BaseException) -> str:
    """The message at the root of a chain: strict configurations wrap it in sentences about validators."""
    while error.__cause__ is not None:
        error = error.__cause__
    message = " ".join(str(error).split())
    return message if " " in message else f"{type(error).__name__}: {message}"  # a pickle's number, a missing key


def load_model(path: Path, *, to_train: bool = False) -> PreTrainedModel:
    """The causal language model saved in a folder.

    `to_train`: the head may be missing, as in a base model; it then starts anew, and a line says so.

    Raises:
        InputError: no folder, nothing in it that loads, or a model without some of its weights.
    """
    check_model_folder(path)
    try:
        model, found = AutoModelForCausalLM.from_pretrained(path, local_files_only=True, output_loading_info=True)
    except Exception as error:  # of whatever kind a damaged folder makes transformers raise
        raise InputError(f"the model in {path} cannot be loaded: {innermost(error)}") from error
    missing = sorted(found["missing_keys"])
    if to_train and missing == [HEAD]:
        print(f"{path} has no {HEAD}: the language modelling head starts anew")
    elif missing:
        # Loading starts them at random, which no measurement and no text would show.
        names = ", ".join(missing[:NAMES_SHOWN]) + (", ..." if len(missing) > NAMES_SHOWN else "")
        remedy = f"train one with `atlas-hf train --init-from {path}`" if missing == [HEAD] else "save the model again"
        raise InputError(
            f"the model in {path} lacks {len(missing)} weight(s) of a causal language model ({names}): name a folder with "
            f"all of them, or {remedy}"
        )
    return model


def check_model_folder(path: Path) -> None:
    if not path.is_dir():
        raise InputError(f"model {path} is not a folder: name one written by `atlas-hf train` or save_pretrained")
    if not (path / "config.json").exists():
        raise InputError(
            f"model {path} has no config.json: name a folder written by `atlas-hf train` or save_pretrained"
        )
