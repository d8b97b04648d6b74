"""Pushing to and loading from a Hub, by the real clients, over loopback and into empty caches."""

import re

import pytest
from huggingface_hub import ModelCard
from safetensors.torch import load as load_tensors

PUSH = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
import atlas_hf
from atlas_hf.sharing import model_card
from huggingface_hub import HfApi

folder = sys.argv[1]
model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
model.push_to_hub("me/tiny")
tokenizer.push_to_hub("me/tiny")
model_card(model, "me/tiny", with_code=False).push_to_hub("me/tiny")
HfApi().create_tag("me/tiny", tag="v1")
model.lm_head.weight.data.zero_()
model.push_to_hub("me/tiny")
model.push_to_hub("me/tiny-private", private=True, max_shard_size="8KB")
HfApi().create_branch("me/tiny", branch="other", revision="v1")
"""

LOAD = """
import sys
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, pipeline
import atlas_hf

original = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
for revision in sys.argv[2:]:
    model = AutoModelForCausalLM.from_pretrained("me/tiny", revision=revision).eval()
    assert type(model) is atlas_hf.AtlasForCausalLM
    for name, tensor in original.state_dict().items():
        assert torch.equal(model.state_dict()[name].view(torch.uint8), tensor.view(torch.uint8)), name
assert type(AutoConfig.from_pretrained("me/tiny")) is atlas_hf.AtlasConfig
tokenizer = AutoTokenizer.from_pretrained("me/tiny")
writer = pipeline("text-generation", model="me/tiny", revision=sys.argv[2])
written = writer("the rain", max_new_tokens=5, do_sample=False)[0]["generated_text"]
ids = model.generate(**tokenizer("the rain", return_tensors="pt"), max_new_tokens=5, do_sample=False)
assert written == tokenizer.decode(ids[0], skip_special_tokens=True)
latest = AutoModelForCausalLM.from_pretrained("me/tiny")
assert latest.lm_head.weight.abs().max() == 0
sharded = AutoModelForCausalLM.from_pretrained("me/tiny-private")
for name, tensor in latest.state_dict().items():
    assert torch.equal(sharded.state_dict()[name], tensor), name
print("loaded")
"""

MISSING = """
for name, revision, message in (("me/nowhere", "main", "me/nowhere"), ("me/tiny", "v9", "v9 is not a valid git identifier")):
    try:
        AutoModelForCausalLM.from_pretrained(name, revision=revision)
    except OSError as error:
        assert message in str(error), error
    else:
        raise AssertionError(f"{name} at {revision} was found")
print("loaded")
"""


@pytest.mark.slow
def test_push_and_load(hub, client, tiny_model, tokenizer, tmp_path):
    model = tiny_model()
    model.save_pretrained(tmp_path / "original")
    tokenizer.save_pretrained(tmp_path / "original")
    client(PUSH, tmp_path / "original", environment=hub.environment(tmp_path / "pusher"))
    files = hub.files("me/tiny", "v1")
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= files.keys()
    assert not any(name.endswith(".py") for name in files), "nobody asked for the code"
    assert load_tensors(files["model.safetensors"]).keys() == model.state_dict().keys()
    assert sum(name.endswith(".safetensors") for name in hub.files("me/tiny-private")) > 1
    assert hub.repositories["model", "me/tiny-private"].private

    environment = hub.environment(tmp_path / "reader")
    assert client(LOAD + MISSING, tmp_path / "original", "v1", "other", environment=environment) == "loaded\n" * 2
    requests = len(hub.requests)
    offline = {**environment, "HF_HUB_OFFLINE": "1"}
    assert client(LOAD, tmp_path / "original", "other", environment=offline) == "loaded\n"
    assert len(hub.requests) == requests, "a filled cache needs no Hub"

    card = ModelCard(hub.files("me/tiny")["README.md"].decode())
    assert card.data.library_name == "transformers"
    assert card.data.pipeline_tag == "text-generation"
    (example,) = re.findall(r"^```python\n(.*?)^```", card.text, re.DOTALL | re.MULTILINE)
    assert "trust_remote_code" not in example
    assert client(example, environment=hub.environment(tmp_path / "reads-the-card")).startswith("Once upon a time")
