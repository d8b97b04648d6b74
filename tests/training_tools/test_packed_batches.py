"""Packed documents through collators, `Trainer`, gradient checkpointing and a PEFT wrapper train as separate runs do."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from training_checks import PEFT_WARNING, KeepGradients, assert_equal_gradients, gradients, losses
from transformers import DataCollatorWithFlattening, Trainer
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

LENGTHS = (5, 9, 1, 7)

COLLATORS = {
    "flattening, positions only": lambda: DataCollatorWithFlattening(),
    "flattening, all keywords": lambda: DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True),
    "trl": lambda: DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True),
    "trl, padded": lambda: DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True, pad_to_multiple_of=8),
}


@pytest.fixture
def documents(random_rows):
    return random_rows(LENGTHS)


def with_adapter(model):
    torch.manual_seed(3)
    config = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    return get_peft_model(model, config)


def apart(model, documents):
    """Loss over all documents' tokens and its gradients, each document by itself."""
    count = torch.tensor(sum(len(d) - 1 for d in documents))
    rows = [torch.tensor([d]) for d in documents if len(d) > 1]
    loss = sum(model(row, labels=row, num_items_in_batch=count).loss for row in rows)
    loss.backward()
    return loss.item(), gradients(model)


@pytest.mark.parametrize("collator", COLLATORS)
def test_collators(tiny_model, documents, collator):
    model = tiny_model().train()
    expected = apart(model, documents)
    model.zero_grad()
    batch = COLLATORS[collator]()([{"input_ids": d} for d in documents])
    assert batch["input_ids"].shape[0] == 1
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    assert loss.item() == pytest.approx(expected[0], rel=1e-5)
    assert_equal_gradients(gradients(model), expected[1])


@PEFT_WARNING
@pytest.mark.parametrize("adapter", [False, True])
@pytest.mark.parametrize("checkpointing", [None, "not reentrant", "reentrant"])
def test_through_trainer(tiny_model, documents, arguments, adapter, checkpointing):
    def model():
        return with_adapter(tiny_model()) if adapter else tiny_model()

    expected = apart(model().train(), documents)
    if adapter:
        assert all("lora_" in name for name in expected[1])
    changes = {}
    if checkpointing:
        changes["activation_checkpointing"] = True
        changes["activation_checkpointing_kwargs"] = {"use_reentrant": checkpointing == "reentrant"}
    keep = KeepGradients()
    trainer = Trainer(
        model=model(),
        args=arguments(max_steps=1, per_device_train_batch_size=len(documents), max_grad_norm=0.0, **changes),
        train_dataset=[{"input_ids": d} for d in documents],
        data_collator=COLLATORS["flattening, all keywords"](),
        callbacks=[keep],
    )
    trainer.train()
    assert losses(trainer)[0] == pytest.approx(expected[0], rel=1e-5)
    assert_equal_gradients(keep.gradients, expected[1])


def test_boundaries_matter(tiny_model, documents):
    """The same tokens as one document give another loss: the tests above can fail."""
    model = tiny_model()
    batch = COLLATORS["flattening, positions only"]()([{"input_ids": d} for d in documents])
    with torch.no_grad():
        packed = model(**batch).loss
        del batch["position_ids"]
        assert (model(**batch).loss - packed).abs() > 1e-4
