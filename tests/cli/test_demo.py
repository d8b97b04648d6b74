"""`atlas-hf demo` in a tiny setting, as a process of its own, from an unrelated folder."""

import json
import subprocess
import sys

FLAGS = (
    *("--characters", "30000", "--vocab-size", "400", "--max-steps", "30", "--batch-size", "4", "--block-size", "32"),
    *("--hidden-size", "32", "--num-hidden-layers", "1", "--num-attention-heads", "2", "--lr", "0.01"),
    *("--set", "chunk_size=8"),
)


def demo(folder, *flags):
    command = [sys.executable, "-W", "error::UserWarning", "-m", "atlas_hf.cli", "demo", *FLAGS, *flags]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)


def test_the_demo_trains_reloads_and_writes(tmp_path):
    finished = demo(tmp_path)
    assert finished.returncode == 0, finished.stderr
    assert finished.stderr == ""
    output = tmp_path / "runs" / "demo"
    perplexity = json.loads((output / "run.json").read_text())["perplexity"]
    assert perplexity["after"] < 0.7 * perplexity["before"]
    for name in ("unigram", "bigram", "before", "after"):
        assert f"{perplexity[name]:8.1f}" in finished.stdout
    for name in ("model.safetensors", "config.json", "tokenizer.json", "loss.png", "run.json"):
        assert (output / name).is_file()
        assert f"runs/demo/{name}" in finished.stdout
    assert "It was a fine morning, and Anne" in finished.stdout
    assert not (tmp_path / "runs" / "demo.partial").exists()

    again = demo(tmp_path)
    assert again.returncode == 2
    assert "--overwrite" in again.stderr
