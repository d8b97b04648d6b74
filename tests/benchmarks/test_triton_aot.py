"""The table of the kernels' resources is that of the kernels as they stand, and they fit."""

import json

import pytest

aot = pytest.importorskip("triton_aot", reason="Triton has no build for this platform", exc_type=ImportError)
TABLE = json.loads(aot.RESULTS.with_suffix(".json").read_text())
# Bytes of a thread, in all functions of a kernel together; products by float32 take more registers than tensor cores do
MOST_SPILLS = {
    ("forward", "tf32x3"): 128,
    ("backward", "tf32x3"): 896,
    ("forward", "ieee"): 64,
    ("backward", "ieee"): 768,
}


def test_the_table_belongs_to_these_kernels():
    assert TABLE["source"] == aot.source_hash(), "run benchmarks/triton_aot.py again"
    assert aot.report(TABLE) == aot.RESULTS.read_text()
    kinds = {tuple(row.values())[:5] for row in TABLE["rows"]}
    assert len(kinds) == len(aot.KERNELS) * len(aot.PRESETS) * len(aot.SHAPES) * len(aot.ARCHITECTURES)


@pytest.mark.parametrize("row", TABLE["rows"], ids=lambda row: "-".join(list(row.values())[:5]))
def test_every_kernel_fits(row):
    assert row["shared_bytes"] <= row["shared_limit"]
    assert row["spill_bytes"] <= MOST_SPILLS[row["kernel"], row["products"]]


@pytest.mark.slow
def test_the_table_is_what_the_compiler_says():
    (row,) = [r for r in TABLE["rows"] if list(r.values())[:5] == ["forward", "titans", "340M", "tf32x3", "sm_90"]]
    if TABLE["triton"] != aot.triton.__version__:
        pytest.skip("the table was made with another Triton")
    assert aot.measure("forward", "titans", "340M", "tf32x3", 90) == row
