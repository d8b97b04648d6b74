"""Show a model's parameters, state per sequence and arithmetic per token.

No weights are made for it: a preset or size answers at once.
"""

import argparse
from pathlib import Path

from transformers import AutoConfig

from atlas_hf.cli.options import add_model_arguments, build_config, check_model_folder, innermost, path
from atlas_hf.modeling.configuration_atlas import AtlasConfig
from atlas_hf.modeling.dispatch import describe
from atlas_hf.modeling.model_statistics import (
    embedding_parameters,
    flops_per_token,
    memory_shapes,
    parameter_count,
    state_bytes,
)
from atlas_hf.modeling.newton_schulz import COEFFICIENTS
from atlas_hf.modeling.recurrence_state import RecurrenceOptions
from atlas_hf.training.errors import InputError

SHOWN = ("num_hidden_layers", "hidden_size", "num_attention_heads", "head_dim", "intermediate_size", "vocab_size")
SHOWN += ("memory", "memory_expansion", "rule", "momentum", "output_errors", "omega_window", "chunk_size")
SHOWN += ("muon_interval", "feature_degree", "feature_rank")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=path, help="folder of a model; the flags of the model are then ignored")
    add_model_arguments(parser)


def load_config(path: Path) -> AtlasConfig:
    """The configuration saved in a folder.

    Raises:
        InputError: no folder, no configuration, or that of another kind of model.
    """
    check_model_folder(path)
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
    except Exception as error:  # of whatever kind a damaged folder makes transformers raise
        raise InputError(f"the configuration in {path} cannot be read: {innermost(error)}") from error
    if config.model_type != AtlasConfig.model_type:
        raise InputError(
            f"model {path} has model_type={config.model_type!r}: `info` knows {AtlasConfig.model_type!r} only"
        )
    return config


def path_of(config: AtlasConfig, part: str = "scan") -> str:
    """Which implementation would run this model's memory on this machine, and why; `part` as for `describe`."""
    own = {name: getattr(config, name) for name in RecurrenceOptions.__dataclass_fields__ if hasattr(config, name)}
    options = RecurrenceOptions(**own, newton_schulz_coefficients=COEFFICIENTS)
    shapes = memory_shapes(config)
    widths = {"key_dim": config.head_dim, "value_dim": config.head_dim, "features": shapes[-1][1]}
    widths["hidden_dim"] = shapes[0][1] if len(shapes) > 1 else 0
    if part == "step":
        widths["residual"] = config.residual_scale != 0
    return describe(config.kernels, options, len(shapes), config.omega_window, part=part, **widths)


def run(arguments: argparse.Namespace) -> None:
    config = load_config(arguments.model) if arguments.model else build_config(arguments)
    for name in SHOWN:
        print(f"{name:<22}{getattr(config, name)}")
    print(f"{'kernels':<22}{path_of(config)}")
    print(f"{'kernels, decoding':<22}{path_of(config, 'step')}")
    state = state_bytes(config)
    embeddings = embedding_parameters(config)
    total = parameter_count(config)
    print(f"{'parameters':<22}{total:,} ({total - embeddings:,} without embeddings and language modelling head)")
    print(f"{'state per sequence':<22}{state:,} bytes ({state / 2**20:.2f} MiB), whatever the context's length")
    print(f"{'FLOPs per token':<22}{flops_per_token(config):,} (forward)")
