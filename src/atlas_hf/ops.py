"""The mathematics of Atlas as plain functions on tensors; `PAPER.md` maps the paper's equations to them."""

from atlas_hf.modeling.feature_map import PolynomialFeatureMap, num_features
from atlas_hf.modeling.newton_schulz import newton_schulz, newton_schulz_factors
from atlas_hf.modeling.recurrence_chunk import chunk_atlas
from atlas_hf.modeling.recurrence_naive import naive_atlas
from atlas_hf.modeling.recurrence_step import step_atlas

__all__ = [
    "PolynomialFeatureMap",
    "chunk_atlas",
    "naive_atlas",
    "newton_schulz",
    "newton_schulz_factors",
    "num_features",
    "step_atlas",
]
