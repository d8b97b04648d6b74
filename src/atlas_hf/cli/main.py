"""Entry point: parses arguments, runs one command, turns input errors into exit code 2."""

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import datasets
from transformers.utils import logging

import atlas_hf
from atlas_hf.cli import demo, evaluate, export, generate, info, train
from atlas_hf.cli.config_file import read_config
from atlas_hf.training.errors import InputError

COMMANDS = {"demo": demo, "train": train, "generate": generate, "info": info, "evaluate": evaluate, "export": export}
INPUT_ERROR = 2
INTERRUPTED = 130


class _Formatter(argparse.ArgumentDefaultsHelpFormatter):
    """Tells a flag's default, but where its text does, or where there is none to tell."""

    def _get_help_string(self, action: argparse.Action) -> str:
        nothing = action.default is None or action.default is False or action.default == []
        told = nothing or "(default" in (action.help or "")
        return (action.help or "") if told else super()._get_help_string(action)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="atlas-hf", description="Train and use ATLAS recurrent memory models.")
    parser.add_argument("--version", action="version", version=f"atlas-hf {atlas_hf.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="{" + ",".join(COMMANDS) + "}")
    for name, module in COMMANDS.items():
        summary = module.__doc__.splitlines()[0]
        command = commands.add_parser(name, help=summary, description=summary, formatter_class=_Formatter)
        module.add_arguments(command)
    return parser


@contextmanager
def _quiet_libraries() -> Iterator[None]:
    """No bars and reminders between the lines of the command; both are as before afterwards."""
    verbosity = logging.get_verbosity()
    bars = logging.is_progress_bar_enabled(), datasets.are_progress_bars_disabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars[0]:
            logging.enable_progress_bar()
        if not bars[1]:
            datasets.enable_progress_bars()


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code: 0, 2 for input that cannot be used, 130 when interrupted."""
    parser = build_parser()
    arguments = parser.parse_args(argv)
    try:
        if getattr(arguments, "config", None):
            command = parser._subparsers._group_actions[0].choices[arguments.command]
            command.set_defaults(**read_config(arguments.config, command))
            arguments = parser.parse_args(argv)
        with _quiet_libraries():
            COMMANDS[arguments.command].run(arguments)
    except InputError as error:
        print(f"atlas-hf {arguments.command}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return INPUT_ERROR
    except KeyboardInterrupt:
        print(f"atlas-hf {arguments.command}: interrupted", file=sys.stderr)
        return INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())
