"""The command line as a whole."""

import re

import pytest

import atlas_hf
from atlas_hf.cli.main import COMMANDS, build_parser


def test_help_and_version(atlas):
    assert atlas("--version").out == f"atlas-hf {atlas_hf.__version__}\n"
    text = atlas("--help").out
    for name in COMMANDS:
        assert name in text
        outcome = atlas(name, "--help")
        assert outcome.code == 0
        assert f"usage: atlas-hf {name}" in outcome.out


def test_every_flag_has_a_help_text():
    for command in build_parser()._subparsers._group_actions[0].choices.values():
        assert all(action.help for action in command._actions)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_tells_each_default_once_and_none_that_is_none(atlas, command):
    text = " ".join(atlas(command, "--help").out.split())
    for nothing in ("(default: None)", "(default: [])", "(default: False)"):
        assert nothing not in text
    assert not re.search(r"\(default[^)]*\) \(default", text)
    if command == "train":
        assert "(default: 0)" in text


def test_no_or_an_unknown_command(atlas):
    for arguments in ((), ("paint",)):
        outcome = atlas(*arguments)
        assert outcome.code == 2
        assert "usage: atlas-hf" in outcome.err
