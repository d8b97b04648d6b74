"""Triton's step of decoding equals PyTorch's: outputs and states, at every place in a chunk. Run by `test_interpreted.py`."""

import pytest
import torch
from problems import make_problem
from transformers import StaticCache

from atlas_hf import AtlasConfig, AtlasForCausalLM
from atlas_hf.kernels import step as kernel
from atlas_hf.ops import chunk_atlas, step_atlas

OPTIONS = {
    "omeganet": {"rule": "gd", "momentum": "none"},
    "restarted": {"rule": "gd", "momentum": "restart"},
    "atlas": {"rule": "muon", "momentum": "restart", "muon_interval": 2},
    "atlas_every_token": {"rule": "muon", "momentum": "none"},
}


@pytest.fixture
def launches(monkeypatch):
    calls = []
    original = kernel.decoding_step
    monkeypatch.setattr(kernel, "decoding_step", lambda *a: calls.append(1) or original(*a))
    return calls


def decode(problem, kernels, split, lengths=None, **options):
    """Outputs of the tokens from `split` on, one by one after those before at once, and the last state."""
    form = {"kernels": kernels, **options}
    state, outputs, tokens = None, [], problem.q.shape[1]
    with torch.no_grad():
        if split:
            _, state = problem.run(chunk_atlas, slice(0, split), lengths=lengths, **options)
        for t in range(split, tokens):
            y, state = problem.run(step_atlas, slice(t, t + 1), initial_state=state, **form)
            outputs.append(y)
    return torch.cat(outputs, 1), state


def assert_as_good(mine, torchs, exact):
    """At most twice as far from float64 as PyTorch's float32, but for rounding: Muon lifts it up to 485-fold."""
    (y, state), (y_other, state_other), (y_exact, state_exact) = mine, torchs, exact
    own = {"step_tokens", "step_seen"}  # PyTorch's alone, made again from the rest where they are missing
    assert state.keys() - {"step_window"} == state_other.keys() - own
    pairs = [(state[n], state_other[n], x) for n, x in state_exact.items() if x.numel() and n not in own]
    pairs.append((y, y_other, y_exact))
    for a, b, c in pairs:
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        error, other = ((x - c).abs().max().item() for x in (a, b))
        assert error <= 2 * other + 1e-5 * c.abs().max().clamp_min(1).item()


@pytest.mark.parametrize(
    ("name", "degree", "rank"),
    [*((name, 2, 2) for name in OPTIONS), ("atlas", 1, None), ("atlas", 2, None), ("omeganet", 3, 2)],
)
def test_equal_at_every_place(launches, name, degree, rank):
    def problem(dtype):
        made = make_problem(tokens=8, degree=degree, rank=rank, residual=False, key_dim=6, hidden=20, dtype=dtype)
        made.v = made.v[..., :5]
        made.memory[0] = made.memory[0][:, :5].contiguous()
        return made

    exact = decode(problem(torch.float64), "torch", 2, **OPTIONS[name])
    torchs = decode(problem(torch.float32), "torch", 2, **OPTIONS[name])
    assert not launches
    mine = decode(problem(torch.float32), "triton", 2, **OPTIONS[name])
    assert len(launches) == 6
    assert_as_good(mine, torchs, exact)


@pytest.mark.parametrize("window", [1, 2, 5])
def test_any_window_from_the_first_token_on(launches, window):
    made = [make_problem(tokens=7, window=window, residual=False, dtype=d) for d in (torch.float32, torch.float64)]
    options = OPTIONS["atlas"]
    exact = decode(made[1], "torch", 0, **options)
    torchs = decode(made[0], "torch", 0, **options)
    assert_as_good(decode(made[0], "triton", 0, **options), torchs, exact)
    assert len(launches) == 7


def test_rows_at_different_places(launches):
    made = [make_problem(tokens=8, batch=3, residual=False, dtype=d) for d in (torch.float32, torch.float64)]
    options = {**OPTIONS["atlas"], "lengths": torch.tensor([5, 1, 0])}
    exact = decode(made[1], "torch", 5, **options)
    torchs = decode(made[0], "torch", 5, **options)
    assert_as_good(decode(made[0], "triton", 5, **options), torchs, exact)
    assert launches


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("first", ["triton", "torch"])
def test_either_goes_on_where_the_other_stopped(launches, first, apart):
    """Also in the middle of a chunk, where each has kept what only it needs."""
    problem = make_problem(tokens=11, batch=3, residual=False, dtype=torch.float32)
    options, other = OPTIONS["atlas"], {"triton": "torch", "torch": "triton"}[first]

    def outputs(*ways):
        lengths = torch.tensor([3, 1, 2]) if apart else None
        with torch.no_grad():
            _, state = problem.run(chunk_atlas, slice(0, 3), lengths=lengths, **options)
            for t, kernels in enumerate(ways, 3):
                y, state = problem.run(step_atlas, slice(t, t + 1), initial_state=state, kernels=kernels, **options)
                yield y

    mixed = list(outputs(first, first, other, other, first, other, other, first))
    assert len(launches) == 4
    alone = list(outputs(*["torch"] * 8))
    assert alone[-1].abs().max() > 1e-3
    torch.testing.assert_close(torch.cat(mixed, 1), torch.cat(alone, 1), rtol=1e-3, atol=1e-4)


def test_features_in_half_precision(launches):
    """As in a model cast as a whole."""
    problem = make_problem(tokens=4, residual=False, dtype=torch.float32)
    problem.feature_map.to(torch.bfloat16)
    torchs = decode(problem, "torch", 1, **OPTIONS["omeganet"])
    mine = decode(problem, "triton", 1, **OPTIONS["omeganet"])
    assert launches
    torch.testing.assert_close(mine[0], torchs[0], rtol=1e-5, atol=1e-6)


def test_the_given_state_stays_as_it_is(launches):
    problem = make_problem(tokens=6, residual=False, dtype=torch.float32)
    with torch.no_grad():
        _, state = problem.run(step_atlas, slice(0, 5), kernels="triton", **OPTIONS["omeganet"])
        before = {name: value.clone() for name, value in state.items()}
        problem.run(step_atlas, slice(5, 6), initial_state=state, kernels="triton", **OPTIONS["omeganet"])
    assert all(torch.equal(state[name], value) for name, value in before.items())


def test_gradients_are_pytorchs(launches):
    problem = make_problem(tokens=3, residual=False, dtype=torch.float32)
    problem.q.requires_grad_()
    y, _ = problem.run(step_atlas, kernels="triton")
    y.sum().backward()
    assert problem.q.grad.any()
    assert not launches


@torch.no_grad()
def test_a_residual_is_refused(launches):
    problem = make_problem(tokens=2, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"a residual has no decoding kernel: .*residual_scale=0; or set kernels="):
        problem.run(step_atlas, kernels="triton")
    assert not launches


@pytest.mark.parametrize(
    ("options", "memory", "reason"),
    [
        ({"momentum": "carry"}, "mlp", "momentum='carry'"),
        ({"output_errors": "anchored"}, "mlp", "output_errors='anchored'"),
        ({"inner_norm": False}, "mlp", "inner_norm=False"),
        ({"decay_to": "zero"}, "mlp", "decay_to='zero'"),
        ({"inner_loss": "dot"}, "mlp", "inner_loss='dot'"),
        ({}, "gated", "a memory of 3 matrices"),
        ({"chunk_size": 63}, "mlp", "exceeds 64"),
    ],
)
def test_what_it_cannot_do_is_refused(launches, options, memory, reason):
    problem = make_problem(memory, tokens=2, residual=False, dtype=torch.float32)
    with torch.no_grad(), pytest.raises(ValueError, match=f"kernels='triton' cannot run: .*{reason}.* or set kernels="):
        problem.run(step_atlas, kernels="triton", **options)
    assert not launches


def test_a_model_decodes_with_it(launches):
    fields = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 32, "feature_rank": 3}
    ids = torch.randint(3, 32, (1, 5), generator=torch.Generator().manual_seed(0))
    for preset in ("atlas", "omeganet"):
        model = AtlasForCausalLM(
            getattr(AtlasConfig, preset)(**fields, initializer_range=0.3, eos_token_id=None)
        ).eval()
        with torch.no_grad():
            wanted = model(ids).logits
            cache = model(ids[:, :1], use_cache=True).cache
            model.config.kernels = "triton"
            found = [model(ids[:, t : t + 1], cache=cache).logits for t in range(1, 5)]
        torch.testing.assert_close(torch.cat(found, 1), wanted[:, 1:], rtol=1e-3, atol=1e-4)
    assert len(launches) == 2 * 4


def test_compiled_decoding_is_one_graph_with_it(monkeypatch):
    """The kernel itself is watched: what calls it is traced once."""
    launches = []

    class Watched:
        def __getitem__(self, grid):
            launches.append(grid)
            return original[grid]

    original = kernel.step_kernel
    monkeypatch.setattr(kernel, "step_kernel", Watched())
    fields = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 32, "feature_rank": 3}
    model = AtlasForCausalLM(AtlasConfig.atlas(**fields, initializer_range=0.3, chunk_size=4, muon_interval=2)).eval()
    ids = torch.randint(3, 32, (1, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = model(ids).logits
        cache = StaticCache(config=model.config, max_cache_len=64)
        model(ids[:, :3], cache=cache)
        model.config.kernels = "triton"
        step = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
        found = [step(ids[:, t : t + 1], cache=cache).logits for t in range(3, 9)]
    torch.testing.assert_close(torch.cat(found, 1), wanted[:, 3:], rtol=1e-3, atol=1e-4)
    assert len(launches) == 6
