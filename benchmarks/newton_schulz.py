"""Newton-Schulz in token space against orthogonalising every matrix: equal numbers, and the ratio of their times.

    python benchmarks/newton_schulz.py            prints the table and writes benchmarks/results/newton_schulz.md

Both compute what every token of a chunk needs: the orthogonalised momentum `NS(S_t)`, `S_t = E^T diag(A_t) X`, in a form that
can be read and folded; in token space as the recurrence takes it, Gram matrices and steps in double. CPU times are medians
of several alternating rounds.
"""

import argparse
import platform
import statistics
import time
from pathlib import Path

import torch

from atlas_hf.modeling.newton_schulz import precise
from atlas_hf.ops import newton_schulz, newton_schulz_factors

RESULTS = Path(__file__).parent / "results" / "newton_schulz.md"
# hidden width E, features F, tokens of a chunk, window
SHAPES = [(256, 201, 16, 8), (128, 101, 16, 4), (256, 101, 16, 4), (256, 201, 32, 8)]


def problem(out, inner, chunk, window, dtype):
    """Errors `E`, inputs `X` of the tokens in view and every write's weights `A [b, R]`."""
    view = chunk + window - 1
    generator = torch.Generator().manual_seed(0)
    errors, x = (torch.randn(view, n, generator=generator, dtype=torch.float64).to(dtype) for n in (out, inner))
    weights = torch.rand(chunk, view, generator=generator, dtype=torch.float64).to(dtype)
    return errors, x, weights.tril(window - 1)


def by_matrices(errors, x, weights):
    """`NS(S_t)` of every token as matrices `[b, out, in]`."""
    return newton_schulz((weights[..., None] * errors).transpose(-1, -2) @ x)


def by_tokens(errors, x, weights):
    """The same as factors `Y_t [b, R, out]`: `NS(S_t) = Y_t^T X`."""
    summed = weights[..., None] * errors
    gram_e, gram_x = (y @ y.transpose(-1, -2) for y in (precise(summed), precise(x)))
    return newton_schulz_factors(gram_e, gram_x).to(summed.dtype).transpose(-1, -2) @ summed


def measure(shape, rounds: int = 7) -> dict:
    """Largest difference in float64, and the median times in float32 on one thread."""
    exact = problem(*shape, torch.float64)
    difference = (by_tokens(*exact).transpose(-1, -2) @ exact[1] - by_matrices(*exact)).abs().max().item()
    data, times = problem(*shape, torch.float32), {by_matrices: [], by_tokens: []}
    for _ in range(rounds):
        for function, taken in times.items():
            repeats = 1 if function is by_matrices else 20
            started = time.process_time()
            for _ in range(repeats):
                function(*data)
            taken.append((time.process_time() - started) / repeats)
    dense, factored = (statistics.median(taken) for taken in times.values())
    return {"difference": difference, "dense": dense, "factored": factored, "ratio": dense / factored}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=RESULTS)
    output = parser.parse_args().output
    torch.set_num_threads(1)
    lines = [
        "# Newton-Schulz in token space",
        "",
        "`python benchmarks/newton_schulz.py`: one chunk of one head, five steps, one CPU thread. CPU times are medians of 7",
        "alternating rounds for float32 factors, whose steps in token space are taken in double; the difference is the",
        "largest for float64 factors.",
        f"{platform.machine()}, torch {torch.__version__}.",
        "",
        "| E | F | tokens in view | difference | matrices, ms | token space, ms | ratio |",
        "|---|---|---|---|---|---|---|",
    ]
    for shape in SHAPES:
        row = measure(shape)
        view = shape[2] + shape[3] - 1
        lines.append(
            f"| {shape[0]} | {shape[1]} | {view} | {row['difference']:.0e} | {1e3 * row['dense']:.1f} | "
            f"{1e3 * row['factored']:.2f} | {row['ratio']:.0f}x |"
        )
    print("\n".join(lines[6:]))
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
