"""Losses and heads: what `Trainer` passes is honoured, classifiers look at the right token."""

import pytest
import torch
import torch.nn.functional as F
from transformers import Trainer, TrainingArguments

from atlas_hf import AtlasForCausalLM, AtlasForSequenceClassification, AtlasForTokenClassification, AtlasModel


def test_loss_is_shifted_and_ignores_what_it_is_told_to(small_model, random_ids):
    model, ids = small_model(), random_ids(2, 9)
    labels = ids.clone()
    labels[0, :4] = -100
    output = model(ids, labels=labels)
    logits = output.logits[:, :-1].float().flatten(0, 1)
    expected = F.cross_entropy(logits, labels[:, 1:].flatten(), ignore_index=-100)
    torch.testing.assert_close(output.loss.float(), expected)


def test_loss_arguments_of_the_trainer(small_model, random_ids):
    model, ids = small_model(), random_ids(2, 9)
    loss = model(ids, labels=ids).loss
    summed = model(ids, labels=ids, num_items_in_batch=torch.tensor(8)).loss
    torch.testing.assert_close(summed, loss * 16 / 8)
    shifted = F.pad(ids, (0, 1), value=-100)[:, 1:].contiguous()
    torch.testing.assert_close(model(ids, labels=ids, shift_labels=shifted).loss, loss)


def test_outputs(small_model, random_ids):
    model, ids = small_model(), random_ids(2, 9)
    output = model(ids, output_hidden_states=True)
    assert len(output.hidden_states) == model.config.num_hidden_layers + 1
    assert torch.equal(output.hidden_states[0], model.get_input_embeddings()(ids))
    logits, cache = model(ids, return_dict=False)[:2]
    torch.testing.assert_close(logits, output.logits)
    assert cache.get_seq_length() == 9
    assert model(ids, use_cache=False).cache is None
    assert torch.equal(model(inputs_embeds=model.get_input_embeddings()(ids)).logits, output.logits)
    with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
        model(ids, inputs_embeds=model.get_input_embeddings()(ids))
    with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
        model()


@pytest.mark.parametrize("kind", [AtlasForSequenceClassification, AtlasForTokenClassification])
def test_classifiers_train(small_config, random_ids, kind):
    model, ids = kind(small_config(num_labels=3)), random_ids(2, 9)
    labels = torch.tensor([0, 2]) if kind is AtlasForSequenceClassification else ids % 3
    output = model(ids, labels=labels)
    assert output.logits.shape == (*labels.shape, 3)
    output.loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@torch.no_grad()
def test_sequence_classification_reads_the_last_real_token(small_config, random_ids, assert_equal_logits):
    model = AtlasForSequenceClassification(small_config(num_labels=3)).double().eval()
    ids = random_ids(3, 9)
    mask = torch.ones_like(ids)
    ids[0, 6:], mask[0, 6:] = 0, 0  # right padding
    ids[1, :4], mask[1, :4] = 0, 0  # left padding
    logits = model(ids, attention_mask=mask).logits
    alone = [model(row[real.bool()][None]).logits for row, real in zip(ids, mask, strict=True)]
    assert_equal_logits(logits, torch.cat(alone))


@torch.no_grad()
def test_sequence_classification_believes_the_mask(small_config, random_ids, assert_equal_logits):
    """Whatever stands at the pads, and without ids too; without mask and padding token nobody could tell."""
    model = AtlasForSequenceClassification(small_config(num_labels=3)).double().eval()
    ids = random_ids(2, 9)
    mask = torch.ones_like(ids)
    mask[0, 6:] = 0
    alone = torch.cat([model(ids[:1, :6]).logits, model(ids[1:]).logits])
    assert_equal_logits(model(ids, attention_mask=mask).logits, alone)
    embeds = model.get_input_embeddings()(ids)
    assert_equal_logits(model(inputs_embeds=embeds, attention_mask=mask).logits, alone)
    assert_equal_logits(model(ids, attention_mask={"atlas": mask}).logits, alone)
    cache = model(ids[:, :4], attention_mask=mask[:, :4], use_cache=True).cache
    assert_equal_logits(model(ids[:, 4:], attention_mask=mask, cache=cache).logits, alone)
    with pytest.raises(ValueError, match="2 rows, and nothing says where each ends"):
        model(inputs_embeds=embeds)


@pytest.mark.parametrize("kind", [AtlasForSequenceClassification, AtlasForTokenClassification])
def test_no_label_is_nothing_to_learn_from(small_config, random_ids, kind):
    model, ids = kind(small_config(num_labels=3)), random_ids(2, 9)
    labels = torch.full((2,) if kind is AtlasForSequenceClassification else (2, 9), -100)
    loss = model(ids, labels=labels).loss
    assert loss.item() == 0
    loss.backward()
    assert all(p.grad is None or torch.equal(p.grad, torch.zeros_like(p)) for p in model.parameters())


def test_of_a_regression_every_number_is_a_label(small_config, random_ids):
    model, ids = AtlasForSequenceClassification(small_config(num_labels=1)), random_ids(2, 9)
    output = model(ids, labels=torch.full((2,), -100.0))
    torch.testing.assert_close(output.loss, F.mse_loss(output.logits[:, 0], torch.full((2,), -100.0)))
    assert output.loss > 5000


@pytest.mark.parametrize("grad", [False, True])
def test_a_batch_without_rows(small_model, random_ids, grad):
    with torch.set_grad_enabled(grad), pytest.raises(ValueError, match=r"a batch of shape \(0, 9\) has no rows"):
        small_model()(random_ids(0, 9))


def test_no_label_by_another_number(small_model, random_ids):
    model, ids = small_model(), random_ids(2, 9)
    assert model(ids, labels=torch.full_like(ids, -1), ignore_index=-1).loss.item() == 0


def test_training_lowers_the_loss(small_model, random_ids, preset):
    model, ids = small_model(preset, dtype=torch.float32, initializer_range=0.02).train(), random_ids(4, 12)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(40):
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]


def test_every_parameter_learns(small_model, random_ids, variant):
    model, ids = small_model(variant).train(), random_ids(2, 19)
    model(ids, labels=ids).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        if "embed_tokens" not in name:
            assert parameter.grad.abs().max() > 0, name


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_trainer(small_config, random_ids, tmp_path, smoothing):
    """Evaluates without gathering caches, and shifts labels for label smoothing as well."""
    model = AtlasForCausalLM(small_config(initializer_range=0.02))
    data = [{"input_ids": row, "labels": row} for row in random_ids(8, 10)]
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=2,
        per_device_train_batch_size=4,
        label_smoothing_factor=smoothing,
        report_to="none",
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data)
    trainer.train()
    metrics = trainer.evaluate()
    batch = torch.stack([row["labels"] for row in data])
    with torch.no_grad():
        logits = model(batch).logits[:, :-1].flatten(0, 1)
        expected = F.cross_entropy(logits, batch[:, 1:].flatten(), label_smoothing=smoothing).item()
    assert metrics["eval_loss"] == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("kind", [AtlasForSequenceClassification, AtlasForTokenClassification])
def test_classifiers_accumulate_gradients(small_config, random_ids, tmp_path, kind):
    """Four passes over a row each learn what one pass over four rows does."""
    ids, norms = random_ids(4, 9), []
    labels = ids[:, 0] % 3 if kind is AtlasForSequenceClassification else ids % 3
    data = [{"input_ids": row, "labels": label} for row, label in zip(ids, labels, strict=True)]
    for passes in (1, 4):
        torch.manual_seed(0)
        arguments = TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=1,
            per_device_train_batch_size=4 // passes,
            gradient_accumulation_steps=passes,
            logging_steps=1,
            report_to="none",
            use_cpu=True,
            save_strategy="no",
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        trainer = Trainer(model=kind(small_config(num_labels=3)), args=arguments, train_dataset=data)
        trainer.train()
        norms.append([trainer.state.log_history[0][name] for name in ("loss", "grad_norm")])
    assert norms[1] == pytest.approx(norms[0], rel=1e-3)


def test_base_model_output(small_config, random_ids):
    model = AtlasModel(small_config())
    output = model(random_ids(2, 5))
    assert output.last_hidden_state.shape == (2, 5, 16)
    assert output.cache.get_seq_length() == 5
