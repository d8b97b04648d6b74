"""The profile counts operations and parts as it says, and has a row for every measure."""

import sys

import pytest
import torch

import speed_profile


def test_operations_of_products():
    a, b = torch.randn(3, 5, 7), torch.randn(3, 7, 11)
    assert speed_profile.count_flops(lambda: a @ b) == 2 * 3 * 5 * 7 * 11
    out = torch.zeros(3, 5, 11)
    assert speed_profile.count_flops(lambda: out.baddbmm_(a, b)) == 2 * 3 * 5 * 7 * 11


def test_parts_are_told_apart():
    a = torch.eye(64) + torch.randn(64, 64).tril(-1)

    def run():
        a @ a
        torch.linalg.solve_triangular(a, a, upper=False)

    parts = speed_profile.seconds_of_parts(run, 2)
    assert parts["products"] > 0
    assert parts["solves"] > 0
    assert speed_profile.seconds_of_parts(lambda: a + a, 2) == {"products": 0, "solves": 0, "calls": 1}


@pytest.mark.slow
def test_rows_of_every_measure(tmp_path, monkeypatch, capsys):
    path = tmp_path / "profile.md"
    arguments = ["--contenders", "omeganet", "--train", "64", "--prefill", "64", "--decode", "24", "--rounds", "3"]
    monkeypatch.setattr(sys, "argv", ["speed_profile.py", *arguments, "--output", str(path)])
    threads = torch.get_num_threads()
    try:
        speed_profile.main()
    finally:
        torch.set_num_threads(threads)
    rows = [line.split("|")[1:-1] for line in path.read_text().splitlines() if line.startswith("| omeganet")]
    assert [row[1].strip() for row in rows] == ["train 64", "prefill 64", "decode 24"]
    for row in rows:
        total, products, _, calls = (float(cell) for cell in row[2:6])
        assert total > 0
        assert products > 0
        assert calls > 1000
        assert min(float(cell) for cell in row[7:10]) > 0
    assert float(rows[2][10]) > 0
    assert "omeganet decode 24" in capsys.readouterr().out
