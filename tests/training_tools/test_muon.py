"""Muon as outer optimiser: what it gets, what decays, one optimiser for schedulers, checkpoints and `Trainer`."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from training_checks import PEFT_WARNING, losses
from transformers import Trainer

from atlas_hf import AtlasForSequenceClassification
from atlas_hf.training.optimizer import MuonAdamW, split_parameters

PROJECTIONS = {f"memory.{n}_proj" for n in "qkvgo"} | {"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}


def test_every_parameter_has_its_place(tiny_model):
    model = tiny_model(num_hidden_layers=1, residual_scale=0.5)
    split = split_parameters(model)
    block = "model.layers.0."
    assert set(split.matrices) == {f"{block}{name}.weight" for name in PROJECTIONS}
    memory = {f"{block}memory.memory_weights.{i}" for i in range(2)}
    assert set(split.decayed) == {
        *("model.embed_tokens.weight", "lm_head.weight", f"{block}memory.feature_map.feature_projection", *memory)
    }
    assert set(split.kept) == {
        *("model.norm.weight", f"{block}input_layernorm.weight", f"{block}post_memory_layernorm.weight"),
        *(f"{block}memory.{name}" for name in ("gate_proj.weight", "gate_bias", "conv.weight", "norm.weight")),
        *(f"{block}memory.{name}" for name in ("residual_scale", "feature_map.feature_coefficients")),
    }
    named = dict(model.named_parameters())
    assert {**split.matrices, **split.decayed, **split.kept}.keys() == named.keys()
    assert all(p.ndim == 2 for p in split.matrices.values())


def test_tied_and_frozen_parameters(tiny_model):
    model = tiny_model(tie_word_embeddings=True)
    model.model.layers[0].requires_grad_(False)
    split = split_parameters(model)
    assert set(split.decayed) >= {"model.embed_tokens.weight"}
    assert "lm_head.weight" not in {**split.matrices, **split.decayed}
    assert not any(".layers.0." in name for name in {**split.matrices, **split.decayed, **split.kept})
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="no trainable matrix"):
        MuonAdamW(model)


@PEFT_WARNING
def test_adapters_are_matrices(tiny_model):
    model = get_peft_model(tiny_model(), LoraConfig(r=2, target_modules=["q_proj", "o_proj"]))
    split = split_parameters(model)
    assert len(split.matrices) == 8
    assert not split.decayed
    assert not split.kept


def test_one_step_is_muons_and_adamws(tiny_model, random_rows):
    """Against the two optimisers on their own."""
    models = [tiny_model(), tiny_model()]
    ids = torch.tensor(random_rows([12, 12]))
    both = [MuonAdamW(models[0], lr=0.01, weight_decay=0.1)]
    split = split_parameters(models[1])
    apart = [
        torch.optim.Muon([*split.matrices.values()], lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(split.adamw_groups(0.1, with_matrices=False), lr=0.01, betas=(0.9, 0.95)),
    ]
    for _ in range(2):
        for model, optimizers in zip(models, (both, apart), strict=True):
            model(ids, labels=ids).loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    for (name, a), b in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert torch.equal(a, b), name


def test_decay_reaches_only_what_may_decay(tiny_model):
    model = tiny_model()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    MuonAdamW(model, lr=0.1, weight_decay=0.5).step()
    split = split_parameters(model)
    for name, parameter in model.named_parameters():
        expected = before[name] if name in split.kept else before[name] * (1 - 0.1 * 0.5)
        torch.testing.assert_close(parameter.detach(), expected, msg=lambda m, n=name: f"{n}: {m}")


def test_trainer_learns_and_resumes(tiny_model, random_rows, arguments, tmp_path):
    """The scheduler drives both, and a checkpoint brings the momenta of both back."""
    data = [{"input_ids": row, "labels": row} for row in random_rows([10] * 2)]

    def run(seed=0, **resume):
        model = tiny_model(seed=seed)
        settings = {"max_steps": 8, "save_strategy": "steps", "save_steps": 4, "lr_scheduler_type": "linear"}
        trainer = Trainer(
            model=model,
            args=arguments(**settings),
            train_dataset=data,
            optimizers=(MuonAdamW(model, lr=0.02), None),
        )
        trainer.train(**resume)
        return trainer

    whole = run()
    assert losses(whole)[-1] < 0.7 * losses(whole)[0]
    assert {group["lr"] for group in whole.optimizer.param_groups} == {0.0}
    again = run(seed=9, resume_from_checkpoint=str(tmp_path / "trainer" / "checkpoint-4"))
    assert losses(again) == losses(whole)
    assert all(torch.equal(a, b) for a, b in zip(again.model.parameters(), whole.model.parameters(), strict=True))


def test_heads_outside_the_blocks_are_no_matrices(tiny_model):
    config = tiny_model().config
    split = split_parameters(AtlasForSequenceClassification(config))
    assert "score.weight" in split.decayed
    assert all("layers." in name for name in split.matrices)


def test_parameters_added_later_are_refused(tiny_model):
    with pytest.raises(ValueError, match="make a new one after unfreezing"):
        MuonAdamW(tiny_model()).add_param_group({"params": [torch.nn.Parameter(torch.ones(2, 2))]})


def test_a_copy_goes_on_like_the_original(tiny_model, random_rows):
    model, ids = tiny_model(), torch.tensor(random_rows([12, 12]))
    optimiser = MuonAdamW(model, lr=0.01)
    for _ in range(2):
        model(ids, labels=ids).loss.backward()
        optimiser.step()
    copied, other = copy.deepcopy((model, optimiser))
    for each, steps in ((model, optimiser), (copied, other)):
        each.zero_grad()
        each(ids, labels=ids).loss.backward()
        steps.step()
    for (name, mine), theirs in zip(model.named_parameters(), copied.parameters(), strict=True):
        assert mine is not theirs
        torch.testing.assert_close(theirs, mine, msg=name)
