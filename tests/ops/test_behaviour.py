"""What the recurrence must do whatever its numbers: remember, not look ahead, stay bounded, refuse what does not fit."""

import pytest
import torch
from problems import CHUNK, make_problem, unit

from atlas_hf.modeling.chunk_scan import Chunk
from atlas_hf.ops import PolynomialFeatureMap, chunk_atlas, naive_atlas, num_features, step_atlas

PRESETS = {
    "atlas": {"rule": "muon", "momentum": "restart"},
    "atlas-anchored": {"rule": "muon", "momentum": "restart", "output_errors": "anchored"},
    "atlas-carry": {"rule": "muon", "momentum": "carry", "output_errors": "anchored"},
    "omeganet": {"rule": "gd"},
    "titans": {"rule": "gd", "momentum": "carry", "output_errors": "anchored"},
}
presets = pytest.mark.parametrize("preset", PRESETS)
# Muon with exact errors writes hidden matrices, of which a linear memory has none
MEMBERS = [(m, n) for m in ("linear", "mlp", "gated") for n in PRESETS if (m, n) != ("linear", "atlas")]


@presets
@pytest.mark.parametrize("memory", ["mlp", "gated"])
def test_a_token_three_chunks_back_moves_the_last_output(preset, memory):
    p = make_problem(memory, tokens=4 * CHUNK)
    before, _ = p.run(chunk_atlas, **PRESETS[preset])
    for name in ("k", "v"):
        other = make_problem(memory, tokens=4 * CHUNK)
        changed = getattr(other, name).clone()
        changed[:, 1] = unit(torch.randn(changed[:, 1].shape, dtype=changed.dtype))
        setattr(other, name, changed)
        after, _ = other.run(chunk_atlas, **PRESETS[preset])
        assert (after[:, -1] - before[:, -1]).abs().max() > 1e-4


@pytest.mark.parametrize(("memory", "preset"), MEMBERS)
@pytest.mark.parametrize("at", [CHUNK - 1, CHUNK, 2 * CHUNK, 2 * CHUNK + 2])
def test_no_output_depends_on_a_later_token(memory, preset, at):
    p = make_problem(memory, tokens=3 * CHUNK + 1, dtype=torch.float32)
    before, _ = p.run(chunk_atlas, **PRESETS[preset])
    for x in (p.q, p.k, p.v, *p.gates.values()):
        x[:, at:] = x[:, at:].roll(1, 1) * 0.9
    after, _ = p.run(chunk_atlas, **PRESETS[preset])
    torch.testing.assert_close(after[:, :at], before[:, :at], rtol=1e-6, atol=1e-6)
    assert (after[:, at:] - before[:, at:]).abs().max() > 1e-3


@presets
def test_rows_of_a_batch_do_not_see_each_other(preset):
    p = make_problem(batch=3)
    before, _ = p.run(chunk_atlas, **PRESETS[preset])
    p.k[1], p.v[1] = unit(torch.randn_like(p.k[1])), torch.randn_like(p.v[1])
    after, _ = p.run(chunk_atlas, **PRESETS[preset])
    torch.testing.assert_close(after[[0, 2]], before[[0, 2]], rtol=0, atol=1e-12)
    assert (after[1] - before[1]).abs().max() > 1e-3


def trained_like_problem(tokens, kind, memory="mlp", dtype=torch.float32):
    """Features without the constant, a start as a model has it, and repeated, alternating or random tokens."""
    p = make_problem(memory, window=4, tokens=tokens, key_dim=16, hidden=32, rank=4, residual=False, dtype=dtype)
    p.feature_map.reset_parameters(torch.nn.init)
    norm = p.feature_map.squared_norm_at_start() ** 0.5
    p.memory = [0.02 * torch.randn_like(p.memory[0]), *(torch.randn_like(m) / norm for m in p.memory[1:])]
    if kind != "random":
        period = 1 if kind == "repeated" else 2
        place = torch.arange(tokens) % period
        p.q, p.k, p.v = (x[:, place] for x in (p.q, p.k, p.v))
    p.q = p.k
    gamma = p.gates["gamma"]
    p.gates["gamma"] = gamma / gamma.sum(-1, keepdim=True).clamp_min(1)
    return p


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["repeated", "alternating", "random"])
@pytest.mark.parametrize("memory", ["linear", "mlp", "gated"])
@pytest.mark.parametrize("eta", [0.25, 1.0])
def test_long_sequences_stay_bounded_under_gd_with_exact_errors(kind, memory, eta):
    p = trained_like_problem(8192, kind, memory)
    p.gates["eta"].fill_(eta)
    p.gates["log_alpha"].mul_(0.01)
    with torch.no_grad():
        y, _ = p.run(chunk_atlas, chunk_size=16)
    assert y.isfinite().all()
    assert y.abs().max() < 5 * p.v.abs().max()


@pytest.mark.slow
def test_a_gated_memory_needs_its_gain(monkeypatch):
    """Why hidden steps are divided by it: the case above, without."""
    monkeypatch.setattr(Chunk, "_gain", lambda self: torch.zeros_like(self.slope[..., 0]))
    p = trained_like_problem(8192, "alternating", "gated")
    p.gates["eta"].fill_(1.0)
    p.gates["log_alpha"].mul_(0.01)
    with torch.no_grad():
        y, _ = p.run(chunk_atlas, chunk_size=16)
    assert not y.abs().max() < 1e3 * p.v.abs().max()  # NaN counts as diverged


@pytest.mark.parametrize("kind", ["repeated", "alternating"])
def test_anchored_errors_diverge_where_exact_ones_do_not(kind):
    """Why exact output errors are the default of gradient descent: the same tokens, the same rates."""
    p = trained_like_problem(2048, kind)
    p.gates["eta"].fill_(0.25)
    p.gates["log_alpha"].mul_(0.01)
    with torch.no_grad():
        exact, anchored = (p.run(chunk_atlas, chunk_size=16, output_errors=e)[0] for e in ("exact", "anchored"))
    assert exact.abs().max() < 2 * p.v.abs().max()
    assert not anchored.abs().max() < 10 * p.v.abs().max()  # NaN counts as diverged


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["repeated", "alternating", "random"])
@pytest.mark.parametrize("memory", ["mlp", "gated"])
@pytest.mark.parametrize("preset", ["atlas", "atlas-anchored", "atlas-carry"])
@pytest.mark.parametrize(("interval", "tokens"), [(4, 8192), (1, 2048)])  # as many writes, which take the time
def test_long_sequences_stay_bounded_under_muon(kind, memory, preset, interval, tokens):
    p = trained_like_problem(tokens, kind, memory)
    p.gates["eta"].fill_(0.1)
    p.gates["log_alpha"].mul_(0.01)
    with torch.no_grad():
        y, _ = p.run(chunk_atlas, chunk_size=16, muon_interval=interval, **PRESETS[preset])
    assert y.isfinite().all()
    assert y.abs().max() < 5 * p.v.abs().max()


@presets
@pytest.mark.parametrize("form", [chunk_atlas, step_atlas, naive_atlas])
@pytest.mark.parametrize("signs", [(1, 1, 1, 1), (-1, 1, 1, 1), (1, -1, 1, -1), (-1, -1, -1, -1), (1, 1, -1, 1)])
def test_gates_at_their_ends_stay_finite(preset, form, signs):
    p = make_problem(tokens=2 * CHUNK + 1, dtype=torch.float32)
    ends = {name: torch.full_like(p.gates[name], 30.0 * s) for name, s in zip(p.gates, signs, strict=True)}
    squash = torch.nn.functional.logsigmoid
    p.gates = {
        "log_alpha": squash(ends["log_alpha"]),
        "eta": ends["eta"].sigmoid(),
        "log_theta": squash(ends["log_theta"]),
        "gamma": ends["gamma"].sigmoid() / p.gates["gamma"].shape[-1],
    }
    leaves = p.leaves()
    y, state = p.run(form, **PRESETS[preset])
    assert y.isfinite().all()
    grads = torch.autograd.grad(y.sum() + state["matrix_0"].sum(), list(leaves.values()), allow_unused=True)
    assert all(g is None or g.isfinite().all() for g in grads)


@pytest.mark.parametrize("form", [chunk_atlas, step_atlas, naive_atlas])
def test_closed_gates_given_as_minus_infinity(form):
    """`alpha = 0` and `theta = 0` are within their domains: the memory forgets at once, the momentum too."""
    p = make_problem(tokens=9)
    p.gates["log_alpha"][:, 5] = -torch.inf
    p.gates["log_theta"][:] = -torch.inf
    leaves = p.leaves()
    y, state = p.run(form, momentum="carry")
    expected, _ = p.run(naive_atlas, momentum="carry")
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)
    grads = torch.autograd.grad(y.sum() + state["matrix_0"].sum(), list(leaves.values()))
    assert all(g.isfinite().all() for g in grads)


def test_the_initial_state_is_left_alone():
    p = make_problem(tokens=12)
    _, state = p.run(chunk_atlas, slice(0, 6))
    copy = {name: value.clone() for name, value in state.items()}
    for form in (chunk_atlas, step_atlas, naive_atlas):
        p.run(form, slice(6, 12), initial_state=state)
        assert state.keys() == copy.keys()
        assert all(torch.equal(state[name], copy[name]) for name in state)


@torch.no_grad()
@pytest.mark.parametrize("form", [chunk_atlas, step_atlas, naive_atlas])
def test_a_state_does_not_change_with_the_weights(form):
    """Before a chunk has ended, and fading to zero, a state still holds the learned start."""
    p = make_problem(tokens=2, batch=1)
    _, state = p.run(form, decay_to="zero")
    before = state["matrix_0"].clone()
    assert before.any()
    for matrix in p.memory:
        matrix.add_(1.0)
    assert torch.equal(state["matrix_0"], before)


@pytest.mark.parametrize("degree", [1, 2, 3, 4])
@pytest.mark.parametrize("rank", [None, 1, 3])
def test_feature_products_equal_the_kernel(degree, rank):
    feature_map = PolynomialFeatureMap(2, 5, degree, rank, dtype=torch.float64)
    for parameter in feature_map.parameters():
        parameter.data.normal_()
    x, y = torch.randn(2, 3, 4, 5, dtype=torch.float64), torch.randn(2, 3, 6, 5, dtype=torch.float64)
    fx, fy = feature_map(x), feature_map(y)
    assert fx.shape[-1] == feature_map.num_features == num_features(5, degree, rank)
    torch.testing.assert_close(fx @ fy.mT, feature_map.kernel(x, y))
    torch.testing.assert_close(fx.square().sum(-1), feature_map.squared_norm(x))
    if degree > 1:
        c = feature_map.feature_coefficients[1]
        p = torch.eye(5, dtype=torch.float64)
        if rank is not None:
            p = feature_map.feature_projection[1]
        u, v = x[1, 0, 0], y[1, 0, 0]
        expected = (
            c[0] ** 2 + c[1] ** 2 * (u @ v) + sum(c[i] ** 2 * ((p @ u) @ (p @ v)) ** i for i in range(2, degree + 1))
        )
        torch.testing.assert_close((fx @ fy.mT)[1, 0, 0, 0], expected)


def call(**changes):
    p = make_problem(changes.pop("memory", "mlp"), tokens=6)
    for name in ("q", "k", "v", "residual_scale", "feature_map"):
        if name in changes:
            setattr(p, name, changes.pop(name))
    gates = p.gates | {name: changes.pop(name) for name in list(changes) if name in p.gates}
    memory, options = p.memory, {"chunk_size": CHUNK, **changes}
    return chunk_atlas(
        p.q, p.k, p.v, memory, **gates, residual_scale=p.residual_scale, feature_map=p.feature_map, **options
    )


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rule": "adam"}, "rule"),
        ({"momentum": "nesterov"}, "momentum"),
        ({"output_errors": "both"}, "output_errors"),
        ({"chunk_size": 0}, "chunk_size"),
        ({"muon_interval": 9}, "muon_interval"),
        ({"muon_interval": 2}, "no meaning with rule='gd'"),
        ({"chunk_size": True}, "chunk_size must be an integer"),
        ({"newton_schulz_coefficients": (1.0, 2.0)}, "three numbers"),
        ({"newton_schulz_coefficients": 1.0}, "three numbers"),
        ({"newton_schulz_steps": -1}, "newton_schulz_steps"),
        ({"hidden_rate": -1.0}, "hidden_rate"),
        ({"hidden_rate": float("nan")}, "hidden_rate must be a number, 0 or more, got nan"),
        ({"feature_map": PolynomialFeatureMap(3, 4, 2)}, "made for 3 heads of width 4, and q has 2 of width 4"),
        ({"lengths": torch.tensor([1.5, 2.0])}, "lengths must be whole numbers, got torch.float32"),
        ({"lengths": torch.tensor([True, False])}, "lengths must be whole numbers, got torch.bool"),
        ({"k": torch.zeros(2, 6, 2, 5)}, "k must have"),
        ({"v": torch.zeros(2, 5, 2, 4)}, "v must be"),
        ({"eta": torch.zeros(2, 6, 3)}, "eta must be"),
        ({"gamma": torch.zeros(2, 6, 2)}, "gamma must be"),
        ({"log_theta": None, "momentum": "carry"}, "log_theta"),
        ({"residual_scale": torch.zeros(3)}, "residual_scale"),
        ({"lengths": torch.tensor([1, 2, 3])}, "lengths"),
        ({"lengths": torch.tensor([1, 99])}, r"lengths must lie between 0 and the T = \d+ tokens of q, got \[1, 99\]"),
        ({"lengths": torch.tensor([-1, 2])}, r"lengths must lie between 0 and .* got \[-1, 2\]"),
        ({"memory": "linear", "rule": "muon"}, "anchored"),
        ({"cu_seqlens": torch.tensor([0, 6])}, "one row"),
        ({"v": torch.zeros(2, 6, 2, 4, dtype=torch.long)}, "v must be of a floating-point dtype, got torch.int64"),
        ({"initial_state": {}}, "initial_state"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_does_not_fit_is_named(changes, named):
    with pytest.raises(ValueError, match=named):
        call(**changes)


@pytest.mark.parametrize("name", ["q", "eta", "lengths"])
def test_lists_are_no_tensors(name):
    with pytest.raises(TypeError, match=rf"{name} must be a tensor, got list: make one of it by torch.tensor"):
        call(**{name: [[1.0], [2.0]]})
    p = make_problem(tokens=6)
    p.memory = [m.tolist() for m in p.memory]
    with pytest.raises(TypeError, match=r"memory\[0\] must be a tensor, got list"):
        p.run(chunk_atlas)


def test_a_feature_map_names_inputs_that_are_not_for_it():
    feature_map = PolynomialFeatureMap(2, 4, 2)
    for shape in ((2, 3, 5), (3, 3, 4)):
        with pytest.raises(ValueError, match="x must have 2 heads on axis 0 and the key width 4"):
            feature_map(torch.zeros(shape))
    with pytest.raises(ValueError, match=r"floating-point dtype, got torch.int64"):
        feature_map(torch.zeros(2, 3, 4, dtype=torch.long))
    for key_dim, degree, rank, message in (
        (4, 0, None, "degree"),
        (4, 7, 2, "degree"),
        (4, 2, 9, "rank"),
        (0, 1, 1, "width"),
    ):
        with pytest.raises(ValueError, match=message):
            num_features(key_dim, degree, rank)


def test_a_state_that_other_steps_left_is_refused():
    p = make_problem(tokens=6)
    _, state = p.run(step_atlas, momentum="carry")
    p.run(step_atlas, momentum="carry", initial_state=state)
    with pytest.raises(ValueError, match=r"initial_state\['step_offset_1'\] .* does not fit this rule"):
        p.run(step_atlas, momentum="carry", rule="muon", initial_state=state)
    for name in ("step_x", "step_gradient_0"):
        with pytest.raises(ValueError, match=rf"initial_state\['{name}'\] is nothing"):
            p.run(step_atlas, momentum="carry", initial_state={n: x for n, x in state.items() if n != name})
    _, state = p.run(step_atlas)
    with pytest.raises(ValueError, match=r"initial_state\['step_gradient_0'\] is nothing"):
        p.run(step_atlas, momentum="restart", initial_state=state)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # by PyTorch's own forward mode
def test_derivatives_that_there_are_not_raise():
    p = make_problem(tokens=6)

    def loss(q):
        p.q = q
        return p.run(chunk_atlas)[0].square().sum()

    q = p.q.clone()
    (gradient,) = torch.autograd.grad(loss(q.requires_grad_()), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()
    with pytest.raises(RuntimeError, match=r"torch\.func"):
        torch.func.grad(loss)(q.detach())
    with pytest.raises(RuntimeError, match="jvp"), torch.autograd.forward_ad.dual_level():
        loss(torch.autograd.forward_ad.make_dual(q.detach(), torch.ones_like(q)))


def test_what_does_not_fit_the_packed_rows_is_named():
    """An index by documents would leave out what is too much."""
    p = make_problem(tokens=6)
    one = {name: x[:1] for name, x in p.gates.items()}
    arguments = {"feature_map": p.feature_map, "chunk_size": CHUNK, "cu_seqlens": torch.tensor([0, 2, 6])}
    q, k, v = (x[:1] for x in (p.q, p.k, p.v))
    chunk_atlas(q, k, v, p.memory, **one, **arguments)
    with pytest.raises(ValueError, match="v must be packed as q is"):
        chunk_atlas(q, k, p.v, p.memory, **one, **arguments)
    longer = one | {"eta": torch.cat((one["eta"], one["eta"]), 1)}
    with pytest.raises(ValueError, match="eta must be packed as q is"):
        chunk_atlas(q, k, v, p.memory, **longer, **arguments)
    for cu_seqlens in (torch.tensor([0.0, 2.5, 6.0]), torch.tensor(6), torch.tensor([0])):
        with pytest.raises(ValueError, match="cu_seqlens must be whole numbers"):
            chunk_atlas(q, k, v, p.memory, **one, **arguments | {"cu_seqlens": cu_seqlens})


def test_a_state_of_another_window_or_chunk_is_refused():
    p = make_problem(tokens=6)
    _, state = p.run(chunk_atlas)
    with pytest.raises(ValueError, match="goes on only where it began"):
        p.run(chunk_atlas, initial_state=state, chunk_size=CHUNK + 1)
