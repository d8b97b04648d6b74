"""Members of the family that are known under other names, against formulas written independently of our code."""

from types import SimpleNamespace

import pytest
import torch
from problems import make_problem, unit

from atlas_hf.modeling.recurrence_naive import inner_gradients
from atlas_hf.ops import chunk_atlas, naive_atlas

PLAIN = {"inner_norm": False, "hidden_rate": 1.0}
FORMS = pytest.mark.parametrize("form", [naive_atlas, chunk_atlas])


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@FORMS
@pytest.mark.parametrize("chunk_size", [1, 3, 16])
def test_omega_rule_of_a_linear_memory(form, chunk_size):
    """Eq. 11: every write sees the errors of its whole window at the memory's latest value, whatever the chunk."""
    p = make_problem("linear", window=3, tokens=10, degree=1, residual=False)
    y, _ = p.run(form, chunk_size=chunk_size, decay_to="zero", **PLAIN)
    for b in range(2):
        for h in range(2):
            w = p.memory[0][h].clone()
            for t in range(10):
                gradient = torch.zeros_like(w)
                for j in range(min(3, t + 1)):
                    k, v = p.k[b, t - j, h], p.v[b, t - j, h]
                    gradient += p.gates["gamma"][b, t, h, j] * torch.outer(w @ k - v, k)
                w = p.gates["log_alpha"][b, t, h].exp() * w - p.gates["eta"][b, t, h] * gradient
                close(y[b, t, h], w @ p.q[b, t, h])


@FORMS
def test_delta_rule(form, fla_naive):
    p = make_problem("linear", window=1, tokens=9, degree=1, residual=False)
    p.gates["log_alpha"].zero_()
    p.gates["gamma"].fill_(1)
    p.memory[0].zero_()
    y, _ = p.run(form, **PLAIN)
    q, k, v, beta = (x.transpose(1, 2) for x in (p.q, p.k, p.v, p.gates["eta"]))
    # The oracle scales queries by the square root of their width.
    o = fla_naive("delta_rule").delta_rule_recurrence(q * p.q.shape[-1] ** 0.5, k, v, beta)[0]
    torch.testing.assert_close(y, o.transpose(1, 2).to(y.dtype), rtol=1e-5, atol=1e-5)  # it runs in float32


@FORMS
def test_hebbian_rule_is_gated_linear_attention(form, fla_naive):
    """Eq. 19: `W_t = alpha W_{t-1} + eta v k^T`."""
    p = make_problem("linear", window=1, tokens=9, degree=1, residual=False)
    p.gates["gamma"].fill_(1)
    p.memory[0].zero_()
    y, _ = p.run(form, inner_loss="dot", **PLAIN)
    decay = p.gates["log_alpha"][..., None].expand_as(p.k)
    scaled = p.gates["eta"][..., None] * p.v
    o = fla_naive("gla").naive_recurrent_gla(p.q * p.q.shape[-1] ** 0.5, p.k, scaled, decay)[0]
    torch.testing.assert_close(y, o.to(y.dtype), rtol=1e-5, atol=1e-5)  # it runs in float32


@FORMS
@pytest.mark.parametrize("output_errors", ["exact", "anchored"])
def test_titans_memory(form, output_errors):
    """One token's gradient by autograd, momentum carried; at `chunk_size=1` both kinds of errors are the rule itself."""
    p = make_problem("mlp", window=1, tokens=8, residual=False)
    p.gates["gamma"].fill_(1)
    y, _ = p.run(form, chunk_size=1, momentum="carry", decay_to="zero", output_errors=output_errors, **PLAIN)
    phi_k, phi_q = (p.feature_map(x.transpose(1, 2), head_axis=1).transpose(1, 2).detach() for x in (p.k, p.q))
    for b in range(2):
        for h in range(2):
            w = [m[h].detach().clone().requires_grad_() for m in p.memory]
            s = [torch.zeros_like(m) for m in w]
            for t in range(8):
                hidden = torch.nn.functional.gelu(w[1] @ phi_k[b, t, h])
                loss = 0.5 * (w[0] @ hidden - p.v[b, t, h]).square().sum()
                grads = torch.autograd.grad(loss, w)
                alpha, theta = (p.gates[n][b, t, h].exp() for n in ("log_alpha", "log_theta"))
                s = [theta * m + p.gates["eta"][b, t, h] * g for m, g in zip(s, grads, strict=True)]
                w = [(alpha * m - g).detach().requires_grad_() for m, g in zip(w, s, strict=True)]
                close(y[b, t, h], w[0] @ torch.nn.functional.gelu(w[1] @ phi_q[b, t, h]))


@FORMS
def test_one_step_of_least_squares(form):
    """A window over everything, even gates, one chunk: the last write is a gradient step on the sum of all errors."""
    tokens = 6
    p = make_problem("linear", window=tokens, tokens=tokens, degree=1, residual=False)
    p.gates["gamma"].fill_(1)
    p.gates["log_alpha"].zero_()
    p.gates["eta"][:, :-1] = 0
    y, _ = p.run(form, output_errors="anchored", chunk_size=tokens, **PLAIN)
    for b in range(2):
        for h in range(2):
            w = p.memory[0][h].clone().requires_grad_()
            loss = 0.5 * (p.k[b, :, h] @ w.T - p.v[b, :, h]).square().sum()
            stepped = w - p.gates["eta"][b, -1, h] * torch.autograd.grad(loss, w)[0]
            close(y[b, -1, h], (stepped @ p.q[b, -1, h]).detach())


@FORMS
def test_linear_memory_with_exact_errors_does_not_depend_on_the_chunk(form):
    p = make_problem("linear", tokens=17)
    reference, _ = p.run(form, chunk_size=1)
    for chunk_size in (2, 5, 16, 32):
        close(p.run(form, chunk_size=chunk_size)[0], reference)
    anchored = p.run(form, chunk_size=5, output_errors="anchored")[0]
    assert (anchored - reference).abs().max() > 1e-3


@pytest.mark.parametrize("memory", ["linear", "mlp", "gated"])
def test_a_normalised_write_at_full_rate_stores_the_pair(memory):
    p = make_problem(memory, window=1, tokens=1, residual=False)
    p.gates["gamma"].fill_(1)
    p.gates["eta"].fill_(1)
    p.gates["log_alpha"].zero_()
    p.q = p.k
    p.memory = [10 * m for m in p.memory]
    y, _ = p.run(chunk_atlas, hidden_rate=0.0)
    # Up to the eps of the normalised step, 1e-6 against the squared length of the hidden activations
    torch.testing.assert_close(y, p.v, rtol=1e-4, atol=1e-4)


@FORMS
def test_retention_of_a_quiet_stretch(form):
    """Long quiet, then a pair to store: a two-layer memory that has faded to zero has no gradient left to store it with."""
    p = make_problem("mlp", window=1, tokens=64, residual=False)
    p.gates["log_alpha"].fill_(-1.0)
    p.gates["log_alpha"][:, -1] = 0
    p.gates["eta"].fill_(0.0)
    p.gates["eta"][:, -1] = 1.0
    p.gates["gamma"].fill_(1)
    p.q, p.v = p.k, 2 * unit(p.v)
    lost, stored = (p.run(form, decay_to=end)[0] for end in ("zero", "init"))
    assert lost[:, -1].abs().max() < 1e-8
    assert (stored[:, -1] - p.v[:, -1]).abs().max() < 0.5


@pytest.mark.parametrize("memory", ["linear", "mlp", "gated"])
@pytest.mark.parametrize("inner_loss", ["l2", "dot"])
@pytest.mark.parametrize("written", [False, True])
def test_inner_gradient_of_the_reference_is_autograd_s(memory, inner_loss, written):
    """`inner_gradients` against automatic differentiation of the inner loss as the paper writes it (Eq. 9, 19).

    `written`: the output matrix has moved from the anchor since. It makes its own error (Eq. 10), and this error goes back
    to the hidden matrices through the anchor's output matrix (Eq. 15).
    """
    p = make_problem(memory)
    rho = p.residual_scale[:, None]
    z, v = p.k[0, 0], p.v[0, 0]
    features = p.feature_map(z[:, None])[:, 0].detach()
    w = [m.clone().requires_grad_() for m in p.memory]
    latest = (p.memory[0] + written * torch.randn_like(p.memory[0])).requires_grad_()
    gelu = torch.nn.functional.gelu
    hidden = features
    if memory != "linear":
        hidden = gelu((w[1] @ features[..., None])[..., 0])
    if memory == "gated":
        hidden = hidden * (w[2] @ features[..., None])[..., 0]
    out = rho * z + (latest @ hidden[..., None])[..., 0]
    loss = 0.5 * (out - v).square().sum() if inner_loss == "l2" else -(out * v).sum()
    error, by_output = torch.autograd.grad(loss, (out, latest), retain_graph=True)
    expected = [by_output]
    if memory != "linear":
        expected += torch.autograd.grad((w[0] @ hidden[..., None])[..., 0], w[1:], error)
    options = SimpleNamespace(inner_loss=inner_loss)
    factors = inner_gradients(p.memory, latest.detach(), features, z, v, rho, options)
    for (given, inputs), wanted in zip(factors, expected, strict=True):
        close(given[..., None] * inputs[..., None, :], wanted)
