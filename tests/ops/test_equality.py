"""The twins compute the same function: outputs, final state and every gradient, in float64."""

import random

import pytest
import torch
from problems import (
    CHUNK,
    LENGTHS,
    assert_states_close,
    label,
    make_problem,
    option_grid,
    public,
    split_options,
    weighted_sum,
)

from atlas_hf.ops import chunk_atlas, naive_atlas, step_atlas

TOLERANCE = {"rtol": 1e-10, "atol": 1e-10}


def outputs_and_gradients(problem, form, **options):
    leaves = problem.leaves()
    y, state = problem.run(form, **options)
    grads = torch.autograd.grad(weighted_sum(y, state), list(leaves.values()), allow_unused=True)
    return y, state, dict(zip(leaves, grads, strict=True))


def assert_twins_agree(problem, form, other, **options):
    y, state, grads = outputs_and_gradients(problem, form, **options)
    y_other, state_other, grads_other = outputs_and_gradients(problem, other, **options)
    torch.testing.assert_close(y, y_other, **TOLERANCE)
    assert_states_close(state, state_other)
    for name, grad in grads_other.items():
        mine = grads[name]
        if grad is None or mine is None:
            assert not any(g is not None and g.any() for g in (grad, mine)), name
            continue
        # Newton-Schulz lifts rounding in faded directions by up to 3.4445^5 = 485: errors count against the largest entry.
        scale = max(1.0, grad.abs().max().item())
        torch.testing.assert_close(
            mine / scale, grad / scale, **TOLERANCE, msg=lambda m, n=name: f"gradient by {n}: {m}"
        )


@pytest.mark.parametrize("options", option_grid(3), ids=label)
def test_chunk_equals_naive(options):
    how, options = split_options(options)
    tokens = random.Random(label(options)).choice(LENGTHS[2:])
    # Four steps: a fifth lifts the rounding of dependent tokens to 3e-10 in one row of the grid (8e-12 with four, 1e-13 with
    # three); the tests of every length below take all five.
    options["newton_schulz_steps"] = 4
    assert_twins_agree(make_problem(tokens=tokens, **how), chunk_atlas, naive_atlas, **options)


@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize("preset", ["gd-exact-none", "gd-anchored-carry", "muon-exact-restart", "muon-anchored-carry"])
@pytest.mark.parametrize("memory", ["mlp", "gated"])
def test_chunk_equals_naive_at_every_length(memory, preset, tokens):
    rule, output_errors, momentum = preset.split("-")
    problem = make_problem(memory, tokens=tokens)
    assert_twins_agree(problem, chunk_atlas, naive_atlas, rule=rule, output_errors=output_errors, momentum=momentum)


@pytest.mark.parametrize("degree", [1, 2, 3, 4])
@pytest.mark.parametrize("rank", [None, 2])
def test_chunk_equals_naive_for_every_feature_map(degree, rank):
    problem = make_problem(degree=degree, rank=rank, tokens=9)
    assert_twins_agree(problem, chunk_atlas, naive_atlas, rule="muon", momentum="restart")


@pytest.mark.parametrize(("chunk_size", "window"), [(1, 1), (1, 3), (2, 5), (3, 7), (16, 2), (5, 5)])
@pytest.mark.parametrize("rule", ["gd", "muon"])
def test_chunk_equals_naive_for_any_chunk_and_window(chunk_size, window, rule):
    problem = make_problem(window=window, tokens=2 * chunk_size + 3)
    assert_twins_agree(problem, chunk_atlas, naive_atlas, rule=rule, momentum="restart", chunk_size=chunk_size)


@pytest.mark.parametrize("options", option_grid(17, seed=3), ids=label)
def test_many_chunks_are_recomputed_to_the_same_gradients(options):
    how, options = split_options(options)
    # Two steps of Newton-Schulz: five lift rounding 485-fold, and ten chunks one after the other compound it.
    problem = make_problem(tokens=37, **how)
    assert_twins_agree(problem, chunk_atlas, naive_atlas, newton_schulz_steps=2, **options)


@pytest.mark.parametrize("options", option_grid(9, seed=1), ids=label)
def test_step_equals_chunk(options):
    how, options = split_options(options)
    assert_twins_agree(make_problem(tokens=2 * CHUNK + 2, **how), step_atlas, chunk_atlas, **options)


@pytest.mark.parametrize("options", option_grid(5, seed=2), ids=label)
def test_every_split_gives_the_same(options):
    how, options = split_options(options)
    problem = make_problem(tokens=14, **how)
    with torch.no_grad():
        y, state = problem.run(chunk_atlas, **options)
        for cuts in ([5, 9], [1, 2], [4, 8], [3, 13], [12, 13]):
            for forms in ((chunk_atlas, step_atlas, chunk_atlas), (step_atlas, naive_atlas, step_atlas)):
                parts, at, so_far = [], 0, None
                for end, form in zip([*cuts, 14], forms, strict=True):
                    part, so_far = problem.run(form, slice(at, end), initial_state=so_far, **options)
                    parts.append(part)
                    at = end
                torch.testing.assert_close(torch.cat(parts, 1), y, **TOLERANCE)
                assert_states_close(so_far, state)


@pytest.mark.parametrize("first", [chunk_atlas, naive_atlas, step_atlas])
@pytest.mark.parametrize("second", [chunk_atlas, naive_atlas, step_atlas])
@pytest.mark.parametrize(("rule", "interval"), [("gd", 1), ("muon", 1), ("muon", 2), ("muon", 4)])
def test_rows_may_stand_at_different_places(first, second, rule, interval):
    problem = make_problem(tokens=14, batch=3)
    options = {"rule": rule, "momentum": "restart", "muon_interval": interval}
    head, tail = torch.tensor([3, 6, 0]), torch.tensor([5, 2, 6])
    rest = head[:, None] + torch.arange(6)
    with torch.no_grad():
        y1, state = problem.run(first, slice(0, 7), lengths=head, **options)
        y2, state = problem.run(second, rest, lengths=tail, initial_state=state, **options)
        for row in range(3):
            n, m = int(head[row]), int(tail[row])
            y, wanted = problem.run(chunk_atlas, slice(0, n + m), **options)
            torch.testing.assert_close(torch.cat([y1[row, :n], y2[row, :m]]), y[row], **TOLERANCE)
            assert not y1[row, n:].any()
            assert not y2[row, m:].any()
            for name, value in public(wanted).items():
                torch.testing.assert_close(state[name][row], value[row], **TOLERANCE)


def test_backward_through_two_segments_equals_one_pass():
    problem = make_problem(tokens=11)
    leaves = list(problem.leaves().values())
    y, state = problem.run(chunk_atlas, rule="muon", momentum="restart")
    whole = torch.autograd.grad(weighted_sum(y, state), leaves)
    y1, state = problem.run(chunk_atlas, slice(0, 6), rule="muon", momentum="restart")
    y2, state = problem.run(chunk_atlas, slice(6, 11), rule="muon", momentum="restart", initial_state=state)
    parts = torch.autograd.grad(weighted_sum(torch.cat([y1, y2], 1), state), leaves)
    for one, two in zip(whole, parts, strict=True):
        torch.testing.assert_close(one, two, **TOLERANCE)


@pytest.mark.parametrize("form", [chunk_atlas, naive_atlas, step_atlas])
def test_packed_documents_equal_separate_ones(form):
    problem = make_problem(tokens=13, batch=1)
    cu = torch.tensor([0, 3, 3, 11, 13])
    y, state = problem.run(form, cu_seqlens=cu, rule="muon", momentum="restart")
    for n in (0, 2, 3):
        alone, wanted = problem.run(chunk_atlas, slice(int(cu[n]), int(cu[n + 1])), rule="muon", momentum="restart")
        torch.testing.assert_close(y[:, cu[n] : cu[n + 1]], alone, **TOLERANCE)
        for name, value in public(wanted).items():
            torch.testing.assert_close(state[name][n : n + 1], value, **TOLERANCE)


@pytest.mark.parametrize(
    "options",
    [
        {"rule": "gd"},
        {"rule": "gd", "momentum": "carry", "output_errors": "anchored"},
        # Fewer steps: five amplify the rounding of near-dependent tokens to what finite differences measure.
        {"rule": "muon", "momentum": "restart", "newton_schulz_steps": 2},
        {"rule": "muon", "momentum": "carry", "output_errors": "anchored", "newton_schulz_steps": 2},
    ],
    ids=label,
)
def test_gradcheck(options):
    chunk = 3
    problem = make_problem("gated", window=2, tokens=2 * chunk + 3, batch=1, heads=1, key_dim=2, hidden=2, rank=1)
    leaves = problem.leaves()

    def outputs(*_):
        y, state = problem.run(chunk_atlas, chunk_size=chunk, **options)
        return y, *(value for name, value in sorted(public(state).items()) if name != "position")

    assert torch.autograd.gradcheck(outputs, tuple(leaves.values()), atol=1e-6, rtol=1e-5, fast_mode=False)


def test_float32_state_whatever_the_inputs():
    problem = make_problem(dtype=torch.bfloat16)
    y, state = problem.run(chunk_atlas, rule="muon", momentum="carry")
    assert y.dtype == torch.bfloat16
    assert {value.dtype for name, value in state.items() if name != "position"} == {torch.float32}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        exact = make_problem(dtype=torch.float32)
        inside, _ = exact.run(chunk_atlas)
    torch.testing.assert_close(inside, exact.run(chunk_atlas)[0], rtol=0, atol=0)


def test_training_keeps_boundary_states_not_intermediates():
    """Bytes kept for the backward pass: far below those of a plain graph of every token, and no faster than the tokens."""

    def saved(form, tokens):
        problem = make_problem(tokens=tokens, key_dim=16, hidden=64, rank=4, dtype=torch.float32)
        problem.leaves()
        inputs = {id(t.untyped_storage()) for t in problem.leaves().values()}
        storages = {}

        def pack(t):
            if id(t.untyped_storage()) not in inputs:
                storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            y, _ = problem.run(form, chunk_size=8, rule="muon", momentum="restart", output_final_state=False)
        assert y.requires_grad
        return sum(storages.values())

    many = saved(chunk_atlas, 8 * 64)
    assert many < 32 * saved(naive_atlas, 16) / 10
    assert saved(chunk_atlas, 8 * 256) < 4 * many
