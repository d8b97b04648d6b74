"""The recall benchmark: a fair task, baselines that are what they are called, causal mixers, rows that merge.

Legend: B batch, T tokens, H heads, K = V head width.
"""

import json
import sys

import pytest
import torch

import recall
from recall_parts import training
from recall_parts.models import ATLAS_MIXERS, HEADS, LAYERS, MIXERS, WIDTH, RecallModel, gated_delta_rule, mixer_config
from recall_parts.report import shown_recipe, table, write_report
from recall_parts.task import IGNORE, SETTINGS, Setting, sample

SMALL = SETTINGS["small"]


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def row(**changes):
    """A row of the results as `train` and the command line write it."""
    plain = {
        "setting": "small",
        "mixer": "omeganet",
        "overrides": {},
        "seed": 0,
        "steps": 200,
        "accuracy": {"100": 0.25, "200": 1.0},
        "cpu_seconds_per_step": 0.1234,
        "parameters": 1000,
        "batch_size": 32,
        "learning_rate": 0.003,
        "commit": "abc1234",
    }
    return {**plain, **changes}


# The task


@pytest.mark.parametrize("name", SETTINGS)
def test_every_label_can_be_read_off_the_sequence(name):
    setting = SETTINGS[name]
    ids, labels = sample(setting, 5, generator())
    assert ids.shape == labels.shape == (5, setting.length)
    half, stored = setting.vocab_size // 2, 2 * setting.num_pairs
    for tokens, answers in zip(ids.tolist(), labels.tolist(), strict=True):
        pairs = dict(zip(tokens[0:stored:2], tokens[1:stored:2], strict=True))
        assert len(pairs) == setting.num_pairs, "keys are distinct"
        assert all(0 < key < half for key in pairs)
        assert all(half <= value < setting.vocab_size for value in pairs.values())
        queries = [(token, answer) for token, answer in zip(tokens, answers, strict=True) if answer != IGNORE]
        assert sorted(queries) == sorted(pairs.items()), "every key is asked once, for its own value"
        assert all(answer == IGNORE for answer in answers[:stored])
        others = [token for token, answer in zip(tokens[stored:], answers[stored:], strict=True) if answer == IGNORE]
        assert set(others) <= {0}, "nothing but filler between the queries"


def test_batches_follow_the_seed_and_differ_from_each_other():
    source = generator(3)
    first, second = sample(SMALL, 8, source), sample(SMALL, 8, source)
    again = sample(SMALL, 8, generator(3))
    for a, b, c in zip(first, second, again, strict=True):
        assert torch.equal(a, c)
        assert not torch.equal(a, b)


def test_queries_come_in_another_order_than_the_pairs_and_at_varying_places():
    ids, labels = sample(SMALL, 64, generator())
    stored = 2 * SMALL.num_pairs
    places = labels != IGNORE
    assert places[:, stored:].any(0).all(), "every place behind the pairs is asked in some sequence"
    in_order = [torch.equal(tokens[:stored:2], tokens[asked]) for tokens, asked in zip(ids, places, strict=True)]
    assert sum(in_order) < 4


@pytest.mark.parametrize(
    "setting",
    [Setting(64, 8, 23), Setting(16, 8, 48)],
    ids=["too short for the queries", "fewer keys than pairs"],
)
def test_a_task_without_room_is_refused(setting):
    with pytest.raises(ValueError, match="no room"):
        sample(setting, 1, generator())


# The gated delta rule


def delta_inputs(num_tokens, dtype=torch.float64):
    """`q, k [B, H, T, K]` of unit length, `v [B, H, T, V]`, `log_alpha, beta [B, H, T]`."""
    draw = {"dtype": torch.float64, "generator": generator()}
    q, k = torch.nn.functional.normalize(torch.randn(2, 2, 3, num_tokens, 5, **draw), dim=-1)
    v = torch.randn(2, 3, num_tokens, 4, **draw)
    log_alpha, beta = -torch.rand(2, 3, num_tokens, **draw), torch.rand(2, 3, num_tokens, **draw)
    return tuple(x.to(dtype).requires_grad_() for x in (q, k, v, log_alpha, beta))


def delta_rule_by_token(q, k, v, log_alpha, beta):
    """`S_t = alpha_t S_{t-1} (1 - beta_t k_t k_t^T) + beta_t v_t k_t^T`, `y_t = S_t q_t`, one token after the other."""
    state = torch.zeros(*v.shape[:2], v.shape[-1], k.shape[-1], dtype=v.dtype)
    outputs = []
    for t in range(q.shape[2]):
        key, rate = k[:, :, t, :, None], beta[:, :, t, None, None]
        state = log_alpha[:, :, t, None, None].exp() * state
        state = state - rate * (state @ key - v[:, :, t, :, None]) @ key.mT
        outputs.append((state @ q[:, :, t, :, None])[..., 0])
    return torch.stack(outputs, 2)


@pytest.mark.parametrize("num_tokens", [1, 2, 37])
def test_gated_delta_rule_equals_the_loop_over_tokens(num_tokens):
    inputs = delta_inputs(num_tokens)
    parallel, by_token = gated_delta_rule(*inputs), delta_rule_by_token(*inputs)
    torch.testing.assert_close(parallel, by_token, rtol=0, atol=1e-10)
    weights = torch.randn(parallel.shape, dtype=parallel.dtype, generator=generator(1))
    gradients = (torch.autograd.grad((y * weights).sum(), inputs) for y in (parallel, by_token))
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


def test_gated_delta_rule_equals_flash_linear_attention(fla_naive):
    q, k, v, log_alpha, beta = (x.detach() for x in delta_inputs(21, torch.float32))
    theirs, _ = fla_naive("gated_delta_rule").naive_recurrent_gated_delta_rule(
        *(x.transpose(1, 2) for x in (q, k, v, beta, log_alpha)), scale=1.0
    )
    torch.testing.assert_close(gated_delta_rule(q, k, v, log_alpha, beta), theirs.transpose(1, 2), rtol=0, atol=1e-5)


def test_gated_delta_rule_stores_a_pair_in_one_full_write():
    _, k, v, log_alpha, beta = (x.detach() for x in delta_inputs(9))
    y = gated_delta_rule(k, k, v, log_alpha, torch.ones_like(beta))
    torch.testing.assert_close(y, v, rtol=0, atol=1e-10)


# The models


@torch.no_grad()
@pytest.mark.parametrize("name", MIXERS)
def test_no_mixer_sees_the_future_and_all_see_the_past(name):
    model = RecallModel(name, SMALL.vocab_size).eval()
    ids, _ = sample(SMALL, 2, generator())
    before = model(ids)
    assert before.shape == (2, SMALL.length, SMALL.vocab_size)
    # Both sides of the presets' chunk edges, and places inside a chunk.
    for last in (0, 3, 14, 15, 16, 31, 40):
        changed = ids.clone()
        changed[:, last + 1 :] = torch.randint(1, SMALL.vocab_size, changed[:, last + 1 :].shape, generator=generator())
        after = model(changed)
        torch.testing.assert_close(after[:, : last + 1], before[:, : last + 1], rtol=0, atol=1e-6)
        assert not torch.allclose(after[:, -1], before[:, -1], atol=1e-3)
    changed = ids.clone()
    changed[:, 1] = SMALL.vocab_size - 1 - ids[:, 1] + SMALL.vocab_size // 2  # another value for the first key
    assert not torch.allclose(model(changed)[:, -1], before[:, -1], atol=1e-6)


@pytest.mark.parametrize("name", MIXERS)
def test_every_parameter_learns_and_starts_finite(name):
    model = RecallModel(name, SMALL.vocab_size)
    ids, labels = sample(SMALL, 2, generator())
    torch.nn.functional.cross_entropy(model(ids).mT, labels, ignore_index=IGNORE).backward()
    for label, parameter in model.named_parameters():
        assert parameter.isfinite().all(), label
        assert parameter.grad is not None, label
        assert parameter.grad.isfinite().all(), label


@pytest.mark.parametrize("name", ATLAS_MIXERS)
def test_the_skeleton_is_common_to_all_mixers(name):
    config = mixer_config(name, {})
    assert (config.hidden_size, config.num_attention_heads, config.num_hidden_layers) == (WIDTH, HEADS, LAYERS)

    def outside(model):
        return {label: p.shape for label, p in model.named_parameters() if ".mixer." not in label}

    assert outside(RecallModel(name, 64)) == outside(RecallModel("attention", 64))


def test_overrides_reach_the_mixer_and_wrong_ones_are_named():
    assert mixer_config("omeganet", {"chunk_size": 8}).chunk_size == 8
    model = RecallModel("omeganet", 64, {"omega_window": 1, "memory": "linear"})
    assert all(block.mixer.config.omega_window == 1 for block in model.blocks)
    with pytest.raises(ValueError, match="chunk_sise"):
        RecallModel("omeganet", 64, {"chunk_sise": 8})
    with pytest.raises(ValueError, match="mamba"):
        RecallModel("mamba", 64)


# Training


def test_accuracy_counts_queries_only():
    def always_40(ids):
        return torch.nn.functional.one_hot(torch.full_like(ids, 40), SMALL.vocab_size).float()

    labels = torch.tensor([[IGNORE, 40, IGNORE, 41], [40, IGNORE, 40, IGNORE]])
    batch = (torch.zeros_like(labels), labels)
    assert training.accuracy(always_40, [batch]) == 0.75
    assert training.accuracy(always_40, [batch, (batch[0][:1], labels[:1])]) == pytest.approx(4 / 6)


def test_schedule_warms_up_and_falls_to_a_tenth():
    rates = [training.schedule(step, 100) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[9] == rates[10] == 1
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert training.schedule(100, 100) == pytest.approx(0.1)


@pytest.mark.parametrize("name", ["attention", "gated_delta", "atlas"])
def test_training_evaluates_on_time_and_follows_the_seed(name, monkeypatch):
    seen = []

    def small_sample(setting, size, source):
        batch = sample(setting, 4, source)
        seen.append(batch[0])
        return batch

    monkeypatch.setattr(training, "sample", small_sample)
    monkeypatch.setattr(training, "EVALUATE_EVERY", 2)
    overrides = {"chunk_size": 8} if name == "atlas" else {}
    lines = []
    first, again, other = (
        training.train(name, "small", seed, 3, overrides, report=report)
        for seed, report in [(0, lines.append), (0, id), (1, id)]
    )
    assert list(first["accuracy"]) == [2, 3], "every second step and the last"
    assert all(0 <= share <= 1 for share in first["accuracy"].values())
    assert first["cpu_seconds_per_step"] > 0
    timeless = [{k: v for k, v in r.items() if k != "cpu_seconds_per_step"} for r in (first, again, other)]
    assert timeless[0] == timeless[1]
    assert timeless[2]["seed"] == 1
    # Two held-out batches and three to train on: all different, the same for a seed, others for another seed.
    runs = [torch.stack(seen[i : i + 5]) for i in (0, 5, 10)]
    assert torch.equal(runs[0], runs[1])
    assert len(torch.cat([runs[0], runs[2]]).flatten(1).unique(dim=0)) == 10
    assert len(lines) == 2
    assert "step 3: loss" in lines[1]


# Results


def test_overrides_are_read_as_json_where_they_are():
    texts = ("chunk_size=8", "hidden_rate=0.3", "inner_norm=false", "memory=linear", "feature_rank=null")
    assert [recall.parse_override(text)[1] for text in texts] == [8, 0.3, False, "linear", None]


def test_a_repeated_run_replaces_its_row_and_no_other(tmp_path):
    path = tmp_path / "deeper" / "recall.json"
    different = [
        {"seed": 1},
        {"overrides": {"chunk_size": 8}},
        {"steps": 300},
        {"mixer": "atlas"},
        {"setting": "large"},
        {"batch_size": 64},
        {"learning_rate": 1e-3},
    ]
    for changes in ({}, *different):
        recall.merge(path, row(**changes))
    recall.merge(path, row(parameters=2000))
    rows = json.loads(path.read_text())
    assert len(rows) == 1 + len(different)
    assert [r["parameters"] for r in rows] == [1000] * len(different) + [2000]


def test_table_has_a_line_for_every_run_under_its_setting():
    rows = [
        row(),
        row(overrides={"chunk_size": 8, "memory": "linear"}, accuracy={"100": 0.5}),
        row(setting="medium", mixer="attention", accuracy={"200": 0.125}),
    ]
    sections = table(rows).split("\n## ")
    assert [section.splitlines()[0] for section in sections[1:]] == ["small, 200 steps", "medium, 200 steps"]
    _, _, heading, rule, *lines = sections[1].rstrip().splitlines()
    assert heading == "| mixer | changed fields | batch | rate | seed | 100 | 200 | CPU s/step | parameters | commit |"
    assert rule.count("|") == heading.count("|")
    assert lines == [
        "| omeganet |  | 32 | 0.003 | 0 | 0.250 | 1.000 | 0.123 | 1000 | abc1234 |",
        "| omeganet | chunk_size=8, memory=linear | 32 | 0.003 | 0 | 0.500 |  | 0.123 | 1000 | abc1234 |",
    ]
    assert "| attention |  | 32 | 0.003 | 0 | 0.125 | 0.123 | 1000 | abc1234 |" in sections[2]


def test_report_writes_table_and_plot(tmp_path):
    path = tmp_path / "recall.json"
    for changes in ({}, {"seed": 1}, {"mixer": "attention"}, {"setting": "large"}, {"overrides": {"chunk_size": 8}}):
        recall.merge(path, row(**changes))
    write_report(path)
    assert len([x for x in path.with_suffix(".md").read_text().splitlines() if x.startswith("| omeganet")]) == 4
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "recall_sweep.png").read_bytes().startswith(b"\x89PNG")


def test_the_plot_shows_the_recipe_of_most_presets():
    long = [row(steps=400, mixer=name) for name in ("atlas", "omeganet")]
    ablations = [row(mixer=name) for name in ("omeganet", "omeganet_no_features", "attention", "gated_delta")]
    assert shown_recipe(ablations + long) == (400, 32, 3e-3)
    assert shown_recipe(ablations + long[:1]) == (200, 32, 3e-3)
    assert shown_recipe([row(), row(steps=100)]) == (200, 32, 3e-3)


def test_report_without_changed_fields_has_no_sweep(tmp_path):
    path = tmp_path / "recall.json"
    recall.merge(path, row())
    write_report(path)
    assert path.with_suffix(".png").exists()
    assert not (tmp_path / "recall_sweep.png").exists()


def test_report_of_changed_runs_alone_has_no_plot(tmp_path):
    path = tmp_path / "recall.json"
    recall.merge(path, row(overrides={"chunk_size": 8}))
    write_report(path)
    assert path.with_suffix(".md").exists()
    assert not path.with_suffix(".png").exists()


def test_command_line_trains_merges_and_reports(tmp_path, monkeypatch, capsys):
    path = tmp_path / "recall.json"
    arguments = ["--mixers", "titans", "omeganet", "--steps", "2", "--override", "chunk_size=8", "--batch-size", "4"]
    monkeypatch.setattr(sys, "argv", ["recall.py", *arguments, "--output", str(path)])
    recall.main()
    rows = json.loads(path.read_text())
    assert [(r["mixer"], r["overrides"], list(r["accuracy"])) for r in rows] == [
        ("titans", {"chunk_size": 8}, ["2"]),
        ("omeganet", {"chunk_size": 8}, ["2"]),
    ]
    assert all(r["torch"] == torch.__version__ and "commit" in r and r["batch_size"] == 4 for r in rows)
    assert capsys.readouterr().out.count("step 2: loss") == 2
    table_before = path.with_suffix(".md").read_text()
    path.with_suffix(".md").unlink()
    monkeypatch.setattr(sys, "argv", ["recall.py", "--table", "--output", str(path)])
    recall.main()
    assert path.with_suffix(".md").read_text() == table_before


def test_command_line_refuses_fields_that_a_baseline_does_not_have(tmp_path, monkeypatch, capsys):
    arguments = ["--mixers", "gated_delta", "omeganet", "--override", "chunk_size=8"]
    monkeypatch.setattr(sys, "argv", ["recall.py", *arguments, "--output", str(tmp_path / "recall.json")])
    with pytest.raises(SystemExit, match="2"):
        recall.main()
    assert "gated_delta" in capsys.readouterr().err
    assert not (tmp_path / "recall.json").exists()
