"""`transformers.Trainer` on an Atlas model: losses, accumulation, checkpointing, half precision, resuming, best model."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from training_checks import KeepGradients, assert_equal_gradients, losses
from transformers import AutoModelForCausalLM, DataCollatorForSeq2Seq, Trainer

LENGTHS = (5, 12, 3, 9, 7, 4, 11, 6)


def rows_with_labels(rows):
    return [{"input_ids": row, "labels": row} for row in rows]


class PadRight:
    """Pads with 0, masks it, and labels it -100."""

    def __call__(self, features):
        length = max(len(f["input_ids"]) for f in features)
        batch = {"input_ids": [], "attention_mask": [], "labels": []}
        for f in features:
            ids, pads = list(f["input_ids"]), length - len(f["input_ids"])
            batch["input_ids"].append(ids + [0] * pads)
            batch["attention_mask"].append([1] * len(ids) + [0] * pads)
            batch["labels"].append(list(f["labels"]) + [-100] * pads)
        return {name: torch.tensor(value) for name, value in batch.items()}


def test_label_smoothing_shifts_the_labels(tiny_model, random_rows, arguments):
    rows = random_rows([10] * 4)
    trainer = Trainer(
        model=tiny_model(),
        args=arguments(max_steps=1, per_device_train_batch_size=4, label_smoothing_factor=0.1),
        train_dataset=rows_with_labels(rows),
    )
    trainer.train()
    ids = torch.tensor(rows)
    with torch.no_grad():
        logits = tiny_model()(ids).logits
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), label_smoothing=0.1)
    unshifted = F.cross_entropy(logits.flatten(0, 1), ids.flatten(), label_smoothing=0.1)
    assert losses(trainer)[0] == pytest.approx(expected.item(), rel=1e-4)
    assert abs(expected - unshifted) > 1e-2


def test_evaluate_with_metrics(tiny_model, random_rows, arguments):
    """`compute_metrics` gets logits alone, not caches, of padded batches of several lengths."""
    seen = {}

    def metrics(prediction):
        seen["logits"], seen["labels"] = prediction
        hits = prediction.predictions[:, :-1].argmax(-1) == prediction.label_ids[:, 1:]
        return {"accuracy": float(hits[prediction.label_ids[:, 1:] != -100].mean())}

    data = rows_with_labels(random_rows(LENGTHS))
    trainer = Trainer(
        model=tiny_model(),
        args=arguments(per_device_eval_batch_size=3),
        eval_dataset=data,
        data_collator=PadRight(),
        compute_metrics=metrics,
    )
    values = trainer.evaluate()
    assert isinstance(seen["logits"], np.ndarray)
    assert seen["logits"].shape == (8, max(LENGTHS), 64)
    model, hits, total, count = tiny_model().eval(), 0, 0.0, 0
    for row in data:
        ids = torch.tensor([row["input_ids"]])
        with torch.no_grad():
            output = model(ids, labels=ids)
        hits += int((output.logits[0, :-1].argmax(-1) == ids[0, 1:]).sum())
        total, count = total + output.loss.item() * (ids.shape[1] - 1), count + ids.shape[1] - 1
    assert values["eval_accuracy"] == pytest.approx(hits / count)
    assert np.isfinite(values["eval_loss"])


@pytest.mark.parametrize("side", ["right", "left"])
def test_gradient_accumulation_equals_one_batch(tiny_model, random_rows, arguments, side):
    """Rows of unequal lengths: one batch of 8, or 4 passes over 2 rows each, or rows by themselves."""
    data = [{**row, "attention_mask": [1] * len(row["input_ids"])} for row in rows_with_labels(random_rows(LENGTHS))]
    for row in data:
        # Nothing predicts a row's first token. Trainer counts labels by place, and would count it where pads stand before it.
        row["labels"] = [-100, *row["labels"][1:]]
    results = []
    for batch, passes in ((8, 1), (2, 4), (1, 8)):
        keep = KeepGradients()
        trainer = Trainer(
            model=tiny_model(),
            args=arguments(
                max_steps=1,
                per_device_train_batch_size=batch,
                gradient_accumulation_steps=passes,
                max_grad_norm=0.0,
                train_sampling_strategy="sequential",
            ),
            train_dataset=data,
            data_collator=DataCollatorForSeq2Seq(PadTokenizer(side), padding=True),
            callbacks=[keep],
        )
        trainer.train()
        results.append((losses(trainer), keep.gradients))
    for found in results[1:]:
        assert found[0] == pytest.approx(results[0][0], rel=1e-4)
        assert_equal_gradients(found[1], results[0][1])


class PadTokenizer:
    """As much of a tokenizer as a padding collator asks for."""

    def __init__(self, side):
        self.padding_side = side

    def pad(self, features, padding=True, max_length=None, pad_to_multiple_of=None, return_tensors=None):
        length = max(len(f["input_ids"]) for f in features)
        fill = {"input_ids": 0, "attention_mask": 0, "labels": -100}
        batch = {}
        for name in features[0]:
            pads = [[fill[name]] * (length - len(f[name])) for f in features]
            rows = [list(f[name]) for f in features]
            rows = [r + p if self.padding_side == "right" else p + r for r, p in zip(rows, pads, strict=True)]
            batch[name] = torch.tensor(rows)
        return batch


def test_resuming_goes_on_with_the_same_losses(tiny_model, random_rows, arguments, tmp_path):
    data = rows_with_labels(random_rows([10] * 12))
    settings = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "cosine"}
    whole = Trainer(model=tiny_model(), args=arguments(**settings), train_dataset=data)
    whole.train()
    folder = tmp_path / "trainer" / "checkpoint-2"
    again = Trainer(model=tiny_model(seed=7), args=arguments(**settings), train_dataset=data)
    again.train(resume_from_checkpoint=str(folder))
    assert len(losses(whole)) == 6
    assert losses(again) == losses(whole)
    assert all(torch.equal(a, b) for a, b in zip(again.model.parameters(), whole.model.parameters(), strict=True))


def test_bf16(tiny_model, random_rows, arguments):
    """Mixed precision: float32 weights, products in bfloat16; memory and losses stay close to float32."""
    data = rows_with_labels(random_rows([12] * 8))
    found = []
    for changes in ({}, {"bf16": True}):
        trainer = Trainer(model=tiny_model(), args=arguments(max_steps=4, **changes), train_dataset=data)
        trainer.train()
        assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}
        found.append(losses(trainer))
    assert found[0] != found[1]
    # Half precision has 8 bits of mantissa.
    assert found[1] == pytest.approx(found[0], rel=2**-7)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(tiny_model, random_rows, arguments, reentrant):
    data = rows_with_labels(random_rows([11] * 6))
    results = []
    for changes in (
        {},
        {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": reentrant}},
    ):
        keep = KeepGradients()
        trainer = Trainer(model=tiny_model(), args=arguments(**changes), train_dataset=data, callbacks=[keep])
        trainer.train()
        assert trainer.model.model.layers[0].gradient_checkpointing == bool(changes)
        results.append((losses(trainer), keep.gradients))
    assert results[1][0] == pytest.approx(results[0][0], rel=1e-5)
    assert_equal_gradients(results[1][1], results[0][1])


def test_the_best_model_is_loaded_at_the_end(tiny_model, random_rows, arguments, tmp_path):
    data = rows_with_labels(random_rows([10] * 6))
    trainer = Trainer(
        model=tiny_model(),
        # The first steps learn, and then the rate makes things worse.
        args=arguments(
            max_steps=4,
            learning_rate=0.2,
            lr_scheduler_type="constant",
            save_strategy="steps",
            save_steps=1,
            eval_strategy="steps",
            eval_steps=1,
            load_best_model_at_end=True,
            metric_for_best_model="eval_loss",
        ),
        train_dataset=data,
        eval_dataset=data,
    )
    trainer.train()
    evaluated = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert min(evaluated) < evaluated[-1]
    assert trainer.evaluate()["eval_loss"] == pytest.approx(min(evaluated), rel=1e-6)
    best = AutoModelForCausalLM.from_pretrained(trainer.state.best_model_checkpoint)
    assert all(torch.equal(a, b) for a, b in zip(best.parameters(), trainer.model.parameters(), strict=True))
