"""The perplexity benchmark trains what it names and keeps the rows of other runs; its table is that of its rows."""

import json
import sys

import pytest

import perplexity


@pytest.fixture
def run(tmp_path, monkeypatch):
    def start(*arguments):
        path = tmp_path / "perplexity.json"
        monkeypatch.setattr(sys, "argv", ["perplexity.py", "--output", str(path), *map(str, arguments)])
        perplexity.main()
        return path

    return start


def test_rows_and_table(run, tmp_path, monkeypatch):
    words = [f"{a}{b}" for a in "bdgklm" for b in ("ar", "en", "ol", "ump")]
    text = tmp_path / "text.txt"
    text.write_text(" ".join(words[i * i % 23] for i in range(6000)))
    monkeypatch.setitem(perplexity.SKELETON, "--hidden-size", 32)
    monkeypatch.setitem(perplexity.BLOCKS, "--block-size", 32)
    flags = ("--texts", text, "--held-out", text, "--steps", 2)
    run(*flags, "--cases", "omeganet", "omeganet_window_2", "omeganet_no_features")
    path = run(*flags, "--cases", "omeganet")
    rows = json.loads(path.read_text())
    assert [row["case"] for row in rows] == ["omeganet_window_2", "omeganet_no_features", "omeganet"]
    assert len({row["after"] for row in rows}) == 3
    assert all(1 < row["after"] < row["before"] for row in rows)
    assert "| omeganet_window_2 | omega_window=2, chunk_size=32 | 2 | 0 |" in path.with_suffix(".md").read_text()


def test_the_table_is_that_of_the_rows():
    rows = json.loads(perplexity.RESULTS.read_text())
    assert perplexity.RESULTS.with_suffix(".md").read_text() == perplexity.table(rows)
