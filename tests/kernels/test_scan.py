"""The fused scan computes what the torch path does: outputs, final state and every gradient, with an error like its own."""

import json

import pytest

# By family. Odd lengths, several chunks, widths that fill no tile; between them padded rows, packed documents, a state from
# an earlier call that leaves rows in the middle of a chunk.
SMALL = {"batch": 2, "heads": 1, "key_dim": 8, "tokens": 11, "hidden": 20}
MUON = {"rule": "muon", "momentum": "restart", "batch": 2, "heads": 2, "key_dim": 8, "hidden": 16, "tokens": 9}
# Two documents: one shorter than a chunk, and one that ends inside its second
PACKED = {"batch": 1, "heads": 2, "cu_seqlens": [0, 3, 9], "tokens": 9}
LONGER = {"cu_seqlens": [0, 2, 15], "tokens": 15}
CASES = {
    "omeganet": [
        {**SMALL, "memory": "mlp", "window": 3, "heads": 2, "lengths": [11, 6], "tiles": 16},
        {**SMALL, **PACKED, "memory": "mlp", "window": 3},
        {**SMALL, "memory": "mlp", "window": 2, "split": 6, "batch": 1, "heads": 2, "decay_to": "zero"},
        # Several blocks of the pairs' system, and more tokens in view than a tile has
        {**SMALL, "memory": "mlp", "window": 2, "chunk_size": 18, "tokens": 20, "batch": 1, "tiles": 16},
    ],
    "without": [
        {**SMALL, "memory": "mlp", "window": 3, "batch": 1, "cu_seqlens": [0, 5, 11], "inner_norm": False},
        {
            **SMALL,
            "memory": "gated",
            "window": 3,
            "output_errors": "anchored",
            "momentum": "restart",
            "heads": 2,
            "batch": 1,
        },
    ],
    "titans": [
        {**SMALL, "memory": "mlp", "window": 1, "momentum": "carry", "degree": 1, "heads": 2, "lengths": [11, 3]},
        {**SMALL, **PACKED, "memory": "mlp", "window": 1, "momentum": "carry", "degree": 1},
        {**SMALL, "memory": "gated", "window": 3, "momentum": "carry", "chunk_size": 6, "batch": 1, "tiles": 16},
    ],
    "linear": [
        {**SMALL, "memory": "linear", "window": 3, "residual": False, "lengths": [8, 11]},
        {
            **SMALL,
            "memory": "linear",
            "window": 2,
            "momentum": "carry",
            "inner_norm": False,
            "decay_to": "zero",
            "split": 5,
        },
        {**SMALL, "memory": "linear", "window": 1, "inner_loss": "dot", "chunk_size": 5},
        {**SMALL, "memory": "mlp", "window": 2, "batch": 1, "tokens": 1},
        {**SMALL, "memory": "mlp", "window": 3, "batch": 1, "tokens": 2, "chunk_size": 1},
        {**SMALL, "memory": "mlp", "window": 2, "inner_loss": "dot", "momentum": "carry", "batch": 1},
    ],
    "atlas": [
        {**MUON, "memory": "mlp", "window": 3, "muon_interval": 2, "lengths": [9, 3]},
        # Chunks and writes as in the preset
        {**MUON, **PACKED, "memory": "mlp", "window": 4, "chunk_size": 8, "muon_interval": 4, **LONGER},
    ],
    "atlas_plus_plus": [
        {**MUON, "memory": "gated", "window": 2, "muon_interval": 2, "hidden": 18, "tiles": 16, "lengths": [6, 9]},
        {**MUON, **PACKED, "memory": "gated", "window": 2, "muon_interval": 4, "hidden": 18},
    ],
    "muon": [
        {
            **MUON,
            "memory": "mlp",
            "batch": 1,
            "window": 2,
            "output_errors": "anchored",
            "muon_interval": 2,
            "newton_schulz_steps": 3,
        },
        {
            **MUON,
            "memory": "linear",
            "batch": 1,
            "window": 3,
            "output_errors": "anchored",
            "muon_interval": 2,
            "split": 6,
        },
    ],
}


# Measured, as parts of a tensor's size: errors up to 7e-7 under gd and 3.4e-6 under Muon, and at most 5e-7 beyond twice those
# of the torch path.
FLOOR = 5e-6


@pytest.mark.slow
@pytest.mark.parametrize("family", CASES)
def test_the_scan_equals_the_torch_path(interpret, family):
    cases = CASES[family]
    for case, errors in zip(cases, json.loads(interpret("scan_equality.py", json.dumps(cases))), strict=True):
        assert len(errors["kernel"]) > 10
        for name, sizes in errors["kernel"].items():
            for size, error in sizes.items():
                allowed = 2 * errors["torch"][name][size] + FLOOR
                assert error <= allowed, f"{size} error of {name}, {case}: {error}, allowed {allowed}"


@pytest.mark.slow
def test_the_operators_keep_pytorchs_rules(interpret):
    assert interpret("scan_operators.py") == "kept\n"
