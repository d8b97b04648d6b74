"""What the scan has no kernel for is refused by name, before anything runs."""

import pytest

from atlas_hf.modeling.recurrence_state import RecurrenceOptions

OPTIONS = {
    "chunk_size": 16,
    "rule": "gd",
    "momentum": "none",
    "inner_loss": "l2",
    "output_errors": "exact",
    "muon_interval": 1,
    "newton_schulz_steps": 5,
    "newton_schulz_coefficients": (3.4445, -4.775, 2.0315),
    "inner_norm": True,
    "hidden_rate": 0.1,
    "decay_to": "init",
}


@pytest.fixture(scope="module")
def supports():
    scan = pytest.importorskip(
        "atlas_hf.kernels.scan", reason="Triton has no build for this platform", exc_type=ImportError
    )
    return scan.supports


@pytest.mark.parametrize(
    ("window", "changes"),
    [
        (4, {}),
        (1, {"momentum": "carry"}),
        (4, {"rule": "muon", "momentum": "restart", "chunk_size": 8, "muon_interval": 4}),
        (8, {"chunk_size": 16}),
        (1, {"chunk_size": 64, "output_errors": "anchored"}),
    ],
)
@pytest.mark.parametrize("num_matrices", [1, 2, 3])
def test_supported(supports, num_matrices, window, changes):
    assert supports(RecurrenceOptions(**OPTIONS | changes), num_matrices, window, key_dim=64) is None


@pytest.mark.parametrize(
    ("window", "changes", "named"),
    [
        (4, {"rule": "muon", "momentum": "carry"}, "momentum='carry'"),
        (4, {"rule": "muon", "momentum": "restart", "chunk_size": 32}, "rule='muon'"),
        (9, {"chunk_size": 16}, "chunk_size=16 and omega_window=9"),
        (2, {"chunk_size": 64, "output_errors": "anchored"}, "chunk_size=64"),
    ],
)
def test_refused(supports, window, changes, named):
    reason = supports(RecurrenceOptions(**OPTIONS | changes), 2, window)
    assert named in reason
    assert ": set " in reason
