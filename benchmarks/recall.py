"""Multi-query associative recall: does the memory remember? (paper, section 6.3 and Table 6).

    python benchmarks/recall.py --setting small --mixers attention gated_delta atlas omeganet --seeds 0 1 2 --steps 600
    python benchmarks/recall.py --setting small --mixers omeganet --override chunk_size=8 learning_rate_init=0.25
    python benchmarks/recall.py --table

Rows are merged into the output file: a run of the same setting, mixer, changed fields, seed, steps, batch size
and learning rate replaces the old row.
"""

import argparse
import fcntl
import json
import subprocess
from pathlib import Path

import torch
import transformers

from recall_parts.models import ATLAS_MIXERS, MIXERS
from recall_parts.report import write_report
from recall_parts.task import SETTINGS
from recall_parts.training import BATCH_SIZE, IDENTITY, LEARNING_RATE, train

RESULTS = Path(__file__).parent / "results" / "recall.json"


def parse_override(text: str):
    """`name=value`, the value as JSON where it is."""
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def merge(path: Path, row: dict) -> None:
    """Add a row to the results, one writer at a time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        rows = json.loads(file.read() or "[]")
        rows = [old for old in rows if any(old[k] != row[k] for k in IDENTITY)]
        rows.append(row)
        file.seek(0)
        file.truncate()
        file.write("[\n" + ",\n".join(json.dumps(r) for r in rows) + "\n]\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--setting", choices=SETTINGS, default="small")
    parser.add_argument(
        "--mixers", nargs="+", choices=MIXERS, default=["attention", "gated_delta", "atlas", "omeganet"]
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--override", nargs="*", type=parse_override, default=[], metavar="FIELD=VALUE")
    parser.add_argument("--batch-size", type=int, default=BATCH_SIZE)
    parser.add_argument("--learning-rate", type=float, default=LEARNING_RATE)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="only draw the table and the plot of the output file")
    args = parser.parse_args()
    baselines = set(args.mixers) - set(ATLAS_MIXERS)
    if args.override and baselines:
        parser.error(
            f"--override changes fields of Atlas, which {', '.join(sorted(baselines))} does not have; leave it out"
        )
    torch.set_num_threads(args.threads)
    if not args.table:
        commit = subprocess.run(
            ["git", "describe", "--always", "--dirty"], capture_output=True, text=True
        ).stdout.strip()
        for name in args.mixers:
            for seed in args.seeds:
                row = train(
                    name,
                    args.setting,
                    seed,
                    args.steps,
                    dict(args.override),
                    args.batch_size,
                    args.learning_rate,
                    lambda s: print(s, flush=True),
                )
                row |= {"commit": commit, "torch": torch.__version__, "transformers": transformers.__version__}
                merge(args.output, row)
    write_report(args.output)


if __name__ == "__main__":
    main()
