"""The table of the kernels' resources is that of the kernels as they stand, and they fit."""

import json

import pytest

aot = pytest.importorskip("triton_aot", reason="Triton has no build for this platform", exc_type=ImportError)
TABLE = json.loads(aot.RESULTS.with_suffix(".json").read_text())
# Bytes of a thread, in all functions of a kernel together; products by float32 take more registers than tensor cores do, and
# matrices of doubles the most
MOST_SPILLS = {
    ("forward", "tf32x3"): 128,
    ("backward", "tf32x3"): 896,
    ("forward", "ieee"): 64,
    ("backward", "ieee"): 768,
    ("step", "ieee"): 640,
    ("newton-schulz forward", "16 tokens"): 0,
    ("newton-schulz backward", "16 tokens"): 96,
    ("newton-schulz forward", "32 tokens"): 0,
    ("newton-schulz backward", "32 tokens"): 1408,
    ("newton-schulz forward", "64 tokens"): 1920,
}


def test_the_table_belongs_to_these_kernels():
    assert TABLE["source"] == aot.source_hash(), "run benchmarks/triton_aot.py again"
    assert aot.report(TABLE) == aot.RESULTS.read_text()
    measured = [tuple(row.values())[:5] for row in TABLE["rows"]]
    assert measured == [(*case, f"sm_{arch}") for case in aot.cases() for arch in aot.ARCHITECTURES]


@pytest.mark.parametrize("row", TABLE["rows"], ids=lambda row: "-".join(list(row.values())[:5]))
def test_every_kernel_fits(row):
    assert row["shared_bytes"] <= row["shared_limit"]
    kind = row["size"] if row["kernel"].startswith("newton-schulz") else row["products"]
    assert row["spill_bytes"] <= MOST_SPILLS[row["kernel"], kind]


@pytest.mark.slow
def test_the_table_is_what_the_compiler_says():
    (row,) = [r for r in TABLE["rows"] if list(r.values())[:5] == ["forward", "titans", "340M", "tf32x3", "sm_90"]]
    if TABLE["triton"] != aot.triton.__version__:
        pytest.skip("the table was made with another Triton")
    assert aot.measure("forward", "titans", "340M", "tf32x3", 90) == row
