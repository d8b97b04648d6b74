"""Perplexity of small language models: what the memory's choices do on text.

    python benchmarks/perplexity.py                                       every case, some minutes each
    python benchmarks/perplexity.py --cases omeganet omeganet_linear --seeds 0 1
    python benchmarks/perplexity.py --table                               only draw the table again

Two layers of width 256 with four heads read 200 steps of 1,024 tokens of one novel and are measured on another, by
`atlas-hf train`. Rows are merged into the output file: a run of the same case, seed and steps replaces the old row.
"""

import argparse
import contextlib
import io
import json
import subprocess
import tempfile
from pathlib import Path

import torch

import atlas_hf
from atlas_hf.cli.main import main as atlas

RESULTS = Path(__file__).parent / "results" / "perplexity.json"
DATA = Path(atlas_hf.__file__).parent / "data"
STEPS = 200
SKELETON = {"--hidden-size": 256, "--num-hidden-layers": 2, "--num-attention-heads": 4}
BLOCKS = {"--batch-size": 4, "--block-size": 256}
# Preset and changed fields
CASES = {
    "omeganet": ("omeganet", {}),
    "omeganet_window_2": ("omeganet", {"omega_window": 2, "chunk_size": 32}),
    "omeganet_gates_0.2": ("omeganet", {"window_gate_init": 0.2}),
    "omeganet_linear": ("omeganet", {"memory": "linear"}),
    "omeganet_no_features": ("omeganet", {"feature_degree": 1, "feature_rank": None}),
    "atlas": ("atlas", {}),
    "atlas_eta_0.5": ("atlas", {"learning_rate_init": 0.5}),
    "atlas_gates_0.2": ("atlas", {"window_gate_init": 0.2}),
    "atlas_every_token": ("atlas", {"muon_interval": 1}),
    "atlas_plus_plus": ("atlas_plus_plus", {}),
    "titans": ("titans", {}),
}


def measure(case: str, seed: int, steps: int, texts: Path, held_out: Path) -> dict:
    """One row: perplexities of the held-out novel after training."""
    preset, fields = CASES[case]
    with tempfile.TemporaryDirectory() as folder:
        flags = {"--output": f"{folder}/run", "--held-out": held_out, "--preset": preset, "--seed": seed}
        flags |= {"--max-steps": steps, **SKELETON, **BLOCKS}
        command = ["train", str(texts), *(str(x) for pair in flags.items() for x in pair)]
        for name, value in fields.items():
            command += ["--set", f"{name}={json.dumps(value) if not isinstance(value, str) else value}"]
        told = io.StringIO()
        with contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
            code = atlas(command)
        if code:
            raise RuntimeError(f"{case}: atlas-hf {' '.join(command)} failed: {told.getvalue()[-2000:]}")
        found = json.loads((Path(folder) / "run" / "run.json").read_text())["perplexity"]
    done = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True)
    row = {"case": case, "preset": preset, "fields": fields, "seed": seed, "steps": steps, **found}
    return {**row, "torch": torch.__version__, "commit": done.stdout.strip()}


def merge(path: Path, row: dict) -> None:
    rows = json.loads(path.read_text()) if path.exists() else []
    rows = [old for old in rows if any(old[key] != row[key] for key in ("case", "seed", "steps"))] + [row]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(rows, indent=1) + "\n")


def table(rows: list[dict]) -> str:
    order = list(CASES)
    lines = [
        "# Perplexity of small language models",
        "",
        "`python benchmarks/perplexity.py --cases` with the cases below: two layers of width 256, four heads, blocks of 256",
        "tokens in batches of four, trained on one novel and measured on another. Bigrams with add-0.1 counts of the same",
        "tokens: " + ", ".join(sorted({f"{row['bigram']:.1f}" for row in rows})) + ".",
        "",
        "| case | changed fields | steps | seed | perplexity | commit |",
        "|---|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=lambda r: (order.index(r["case"]), r["steps"], r["seed"])):
        changed = ", ".join(f"{name}={value}" for name, value in row["fields"].items())
        lines.append(
            f"| {row['case']} | {changed} | {row['steps']} | {row['seed']} | {row['after']:.1f} | {row['commit']} |"
        )
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--texts", type=Path, default=DATA / "prideprejudice.txt")
    parser.add_argument("--held-out", type=Path, default=DATA / "persuasion.txt")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="only draw the table of the output file")
    args = parser.parse_args()
    if not args.table:
        for seed in args.seeds:
            for case in args.cases:
                row = measure(case, seed, args.steps, args.texts, args.held_out)
                merge(args.output, row)
                print(f"{case} seed {seed}: {row['after']:.1f}", flush=True)
    args.output.with_suffix(".md").write_text(table(json.loads(args.output.read_text())))


if __name__ == "__main__":
    main()
