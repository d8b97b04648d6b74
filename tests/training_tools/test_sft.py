"""trl's `SFTTrainer`: chat templates, completions only, packing; losses are those of the documents by themselves."""

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from training_checks import PEFT_WARNING, TRL_WARNING, KeepGradients, assert_equal_gradients, losses
from trl import SFTConfig, SFTTrainer

from atlas_hf.training.tokenizer import train_tokenizer

pytestmark = TRL_WARNING

TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
QUESTIONS = [
    ("Where is the inn?", "Past the bridge."),
    ("Who keeps it?", "An old soldier and his two daughters."),
    ("Is there a fire?", "There is."),
    ("What does a bed cost?", "Two shillings, with a candle."),
]


@pytest.fixture(scope="module")
def tokenizer():
    made = train_tokenizer([q + a for q, a in QUESTIONS] * 5, 300)
    made.chat_template = TEMPLATE
    return made


@pytest.fixture
def model(tiny_model, tokenizer):
    return lambda: tiny_model(
        vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id
    )


@pytest.fixture
def trainer(model, tokenizer, arguments):
    def make(rows, **changes):
        settings = {"max_steps": 1, "per_device_train_batch_size": 4, "max_grad_norm": 0.0, "max_length": 64}
        peft_config = changes.pop("peft_config", None)
        keep = KeepGradients()
        made = SFTTrainer(
            model=model(),
            args=arguments(SFTConfig, **{**settings, **changes}),
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            callbacks=[keep],
            peft_config=peft_config,
        )
        made.train()
        return made, keep

    return make


def expected_loss(model, documents, prompts=None):
    """Mean over all predicted tokens of each document by itself; `prompts`: tokens at the start that are not predicted."""
    total, count = 0.0, 0
    for number, document in enumerate(documents):
        ids = torch.tensor([document])
        labels = ids.clone()
        if prompts is not None:
            labels[:, : prompts[number]] = -100
        targets = int((labels[:, 1:] != -100).sum())
        with torch.no_grad():
            total += model(ids, labels=labels).loss.item() * targets
        count += targets
    return total / count


def test_chat_template(trainer, model, tokenizer):
    rows = [{"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]} for q, a in QUESTIONS]
    documents = [tokenizer.apply_chat_template(row["messages"], return_dict=False) for row in rows]
    done, _ = trainer(rows)
    assert "<user>Where is the inn?<|endoftext|><assistant>" in tokenizer.decode(documents[0])
    assert losses(done)[0] == pytest.approx(expected_loss(model(), documents), rel=1e-4)


def test_completion_only(trainer, model, tokenizer):
    rows = [{"prompt": q, "completion": a} for q, a in QUESTIONS]
    done, _ = trainer(rows)
    prompts = [len(tokenizer(q)["input_ids"]) for q, _ in QUESTIONS]
    documents = [tokenizer(q)["input_ids"] + tokenizer(a)["input_ids"] + [tokenizer.eos_token_id] for q, a in QUESTIONS]
    only, all_tokens = (expected_loss(model(), documents, p) for p in (prompts, None))
    assert losses(done)[0] == pytest.approx(only, rel=1e-4)
    assert abs(only - all_tokens) > 1e-3


@pytest.mark.parametrize("how", [{"padding_free": True, "max_length": None}, {"packing": True, "max_length": 160}])
def test_packing(trainer, model, tokenizer, how):
    """`padding_free` flattens a batch into one row; `packing` fills rows with whole documents."""
    rows = [{"text": q + a} for q, a in QUESTIONS]
    documents = [tokenizer(row["text"])["input_ids"] + [tokenizer.eos_token_id] for row in rows]
    done, keep = trainer(rows, **how)
    batch = next(iter(done.get_train_dataloader()))
    assert batch["input_ids"].shape == (1, sum(len(d) for d in documents))
    assert losses(done)[0] == pytest.approx(expected_loss(model(), documents), rel=1e-4)
    padded, keep_padded = trainer(rows)
    assert next(iter(padded.get_train_dataloader()))["input_ids"].shape[0] == 4
    assert_equal_gradients(keep.gradients, keep_padded.gradients)


@PEFT_WARNING
def test_packing_with_an_adapter_and_checkpointing(trainer, model, tokenizer):
    rows = [{"text": q + a} for q, a in QUESTIONS]
    documents = [tokenizer(row["text"])["input_ids"] + [tokenizer.eos_token_id] for row in rows]
    config = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    done, keep = trainer(rows, packing=True, max_length=160, peft_config=config)
    assert losses(done)[0] == pytest.approx(expected_loss(model(), documents), rel=1e-4)
    assert keep.gradients
    assert all("lora_" in name for name in keep.gradients)
