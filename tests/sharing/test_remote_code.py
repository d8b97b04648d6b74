"""Repositories that bring their code along load, generate and train where atlas_hf is not installed, and beside it."""

import importlib.metadata
import json
import re
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from atlas_hf import AtlasForCausalLM, AtlasForSequenceClassification
from atlas_hf.cli.main import main
from atlas_hf.modeling.requirements_atlas import LOWEST, check_requirements
from atlas_hf.sharing import model_card, prepare_for_hub, save_for_hub
from atlas_hf.sharing.remote_code import CLASSES

LOAD = """
import json, sys
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

name, expected = sys.argv[1], torch.load(sys.argv[2])
trusting = {"trust_remote_code": True}
config = AutoConfig.from_pretrained(name, **trusting)
assert type(config).__module__.startswith("transformers_modules."), type(config).__module__
for factory in sys.argv[3].split(","):
    model, info = getattr(transformers, factory).from_pretrained(name, output_loading_info=True, **trusting)
    assert type(model).__module__.startswith("transformers_modules."), type(model).__module__
    assert type(config) is type(model.config)
    assert not info["unexpected_keys"] - {"lm_head.weight"}, info
    assert not info["missing_keys"] - {"score.weight", "score.bias"}, info
model = AutoModelForCausalLM.from_pretrained(name, **trusting).eval()
with torch.no_grad():
    assert torch.equal(model(expected["ids"]).logits, expected["logits"])
for arguments in ({}, {"use_cache": False}, {"num_beams": 3}):
    written = model.generate(expected["ids"], max_new_tokens=6, do_sample=False, **arguments)
    if not "num_beams" in arguments:
        assert torch.equal(written, expected["written"])
tokenizer = AutoTokenizer.from_pretrained(name, **trusting)
assert tokenizer("the rain").input_ids == expected["tokens"]
print("loaded")
"""

TRAIN = """
from transformers import Trainer, TrainingArguments
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

checkpoint, reference = sys.argv[4:]
model = AutoModelForCausalLM.from_pretrained(checkpoint, **trusting)
rows = torch.load(reference)
arguments = TrainingArguments(**json.loads(rows["arguments"]))
trainer = Trainer(model=model, args=arguments, train_dataset=[{"input_ids": row, "labels": row} for row in rows["ids"]])
trainer.train(resume_from_checkpoint=checkpoint)
assert trainer.state.global_step == 4
for key, tensor in model.state_dict().items():
    torch.testing.assert_close(tensor, rows["weights"][key], rtol=1e-5, atol=1e-6, msg=key)
# Saving again brings the code along, so that checkpoints of checkpoints load.
model.save_pretrained("again")
again = AutoModelForCausalLM.from_pretrained("again", **trusting)
assert torch.equal(again.lm_head.weight, model.lm_head.weight)
assert "AtlasForCausalLM" in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values(), "label smoothing would not shift labels"
print("trained")
"""

# Two revisions of one repository, in turns; then what the process's table of cache layers holds is that of the last.
SIDE_BY_SIDE = """
import sys
import torch
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache
from transformers.dynamic_module_utils import get_class_from_dynamic_module

expected, installed = torch.load(sys.argv[1]), sys.argv[2] == "installed"
ids = expected["ids"]

def check(model, factor):
    with torch.no_grad():
        assert torch.equal(model(ids).logits, factor * expected["logits"])
        assert torch.equal(model.generate(ids, max_new_tokens=6, do_sample=False), expected["written"])
        model.generate(ids, max_new_tokens=6, do_sample=False, num_beams=2)
        lookup = model.generate(ids[:1], max_new_tokens=6, do_sample=False, prompt_lookup_num_tokens=2)
        assert torch.equal(lookup, expected["written"][:1])
        for cache in (DynamicCache(config=model.config), StaticCache(model.config, max_cache_len=32)):
            pieces = [model(part, cache=cache).logits for part in ids.split(4, 1)]
            torch.testing.assert_close(torch.cat(pieces, 1), factor * expected["logits"], rtol=1e-3, atol=1e-4)

if installed:
    import atlas_hf
    first = AutoModelForCausalLM.from_pretrained("me/tiny", revision="old", trust_remote_code=True).eval()
    assert type(first) is atlas_hf.AtlasForCausalLM, "the installed package comes first"
    kind = get_class_from_dynamic_module("modeling_atlas.AtlasForCausalLM", "me/tiny", revision="new")
    load = lambda: kind.from_pretrained("me/tiny", revision="new").eval()
else:
    first = AutoModelForCausalLM.from_pretrained("me/tiny", revision="old", trust_remote_code=True).eval()
    load = lambda: AutoModelForCausalLM.from_pretrained("me/tiny", revision="new", trust_remote_code=True).eval()
check(first, 1)
second = load()
assert type(second) is not type(first)
for _ in range(2):
    check(first, 1)
    check(second, 2)
print("undisturbed")
"""

PUSH = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
import atlas_hf
from atlas_hf.sharing import model_card, prepare_for_hub
from huggingface_hub import HfApi

model, tokenizer = AutoModelForCausalLM.from_pretrained(sys.argv[1]), AutoTokenizer.from_pretrained(sys.argv[1])
prepare_for_hub(model)
model.push_to_hub("me/tiny")
tokenizer.push_to_hub("me/tiny")
model_card(model, "me/tiny").push_to_hub("me/tiny")
HfApi().create_tag("me/tiny", tag="old")
HfApi().upload_folder(folder_path=sys.argv[2], repo_id="me/tiny")
HfApi().create_tag("me/tiny", tag="new")
"""


@pytest.fixture
def expected(tiny_model, tokenizer, ids, tmp_path):
    """A model saved as `original`, and what it gives for `ids`, in a file."""
    model = tiny_model()
    model.save_pretrained(tmp_path / "original")
    tokenizer.save_pretrained(tmp_path / "original")
    with torch.no_grad():
        logits = model(ids).logits
    written = model.generate(ids, max_new_tokens=6, do_sample=False)
    file = tmp_path / "expected.pt"
    torch.save({"ids": ids, "logits": logits, "written": written, "tokens": tokenizer("the rain").input_ids}, file)
    return file


def change_the_code(folder):
    """Another revision: logits twice as large, and cache layers that no other revision can use."""
    changes = {
        "modeling_atlas.py": ("logits = self.lm_head(", "logits = 2 * self.lm_head("),
        "cache_atlas.py": ("update_states", "take_states"),
        "memory_layer.py": ("update_states", "take_states"),
    }
    for file, (old, new) in changes.items():
        text = (folder / file).read_text()
        assert old in text, file
        (folder / file).write_text(text.replace(old, new))


@pytest.mark.slow
def test_a_folder_without_the_package(client, expected, tiny_model, ids, tmp_path, monkeypatch):
    """Written by the command line; then a training run that stops here and goes on there."""
    monkeypatch.chdir(tmp_path)
    assert main(["export", "shared", "--with-code", "--model", "original", "--repo-id", "me/tiny"]) == 0
    assert not any(kind._auto_class for kind in CLASSES.values())
    factories = [name for name in CLASSES if name != "AutoConfig"]

    prepare_for_hub(model := tiny_model(initializer_range=0.02))
    arguments = {"max_steps": 4, "save_steps": 2, "logging_steps": 1, "per_device_train_batch_size": 2, "seed": 3}
    arguments |= {"report_to": "none", "use_cpu": True, "disable_tqdm": True, "dataloader_pin_memory": False}
    rows = torch.randint(3, 250, (8, 12), generator=torch.Generator().manual_seed(2))
    data = [{"input_ids": row, "labels": row} for row in rows]
    Trainer(model=model, args=TrainingArguments(output_dir="run", **arguments), train_dataset=data).train()
    described = json.dumps({"output_dir": "resumed", **arguments})
    torch.save({"ids": rows, "weights": model.state_dict(), "arguments": described}, "reference.pt")

    program, checkpoint = LOAD + TRAIN, tmp_path / "run" / "checkpoint-2"
    printed = client(program, "shared", expected, ",".join(factories), checkpoint, "reference.pt", installed=False)
    assert printed.startswith("loaded\n")
    assert printed.endswith("trained\n")


@pytest.mark.slow
def test_the_hub_without_the_package_and_beside_it(hub, client, expected, tmp_path):
    save_for_hub(AtlasForCausalLM.from_pretrained(tmp_path / "original"), tmp_path / "new")
    (tmp_path / "new" / "README.md").unlink()
    change_the_code(tmp_path / "new")
    client(PUSH, tmp_path / "original", tmp_path / "new", environment=hub.environment(tmp_path / "pusher"))

    environment = hub.environment(tmp_path / "reader")
    example = re.search(r"^```python\n(.*?)^```", hub.files("me/tiny")["README.md"].decode(), re.DOTALL | re.MULTILINE)
    assert "trust_remote_code=True" in example[1]
    load = LOAD.replace("trusting = {", 'trusting = {"revision": "old", ') + example[1]
    printed = client(load, "me/tiny", expected, "AutoModel", environment=environment, installed=False)
    assert printed.startswith("loaded\nOnce upon a time")
    offline = {**environment, "HF_HUB_OFFLINE": "1"}
    assert client(load, "me/tiny", expected, "AutoModel", environment=offline, installed=False) == printed

    for installed in (False, True):
        found = client(
            SIDE_BY_SIDE, expected, "installed" if installed else "", environment=environment, installed=installed
        )
        assert found == "undisturbed\n"


@pytest.mark.slow
def test_an_old_transformers_is_named(client, tiny_model, tmp_path):
    save_for_hub(tiny_model(), tmp_path / "shared")
    program = "import transformers\ntransformers.__version__ = '5.23.0'\n"
    program += "transformers.AutoConfig.from_pretrained('shared', trust_remote_code=True)"
    error = client(program, fails=True, installed=False)
    assert "ImportError: Atlas models need transformers>=5.24, but transformers 5.23.0 is installed" in error
    assert "pip install --upgrade 'transformers>=5.24'" in error


@pytest.mark.parametrize(
    ("found", "wanted", "fits"),
    [
        *(("5.24.0", "5.24", True), ("5.24.0.dev0", "5.24", True), ("6.0", "5.24", True), ("2.13.0+cpu", "2.9", True)),
        *(("5.23.9", "5.24", False), ("5.3.1", "5.24", False), ("4.57", "5.24", False)),
    ],
)
def test_versions_are_compared_as_numbers(monkeypatch, found, wanted, fits):
    monkeypatch.setattr("transformers.__version__", found)
    if fits:
        check_requirements({"transformers": wanted})
    else:
        with pytest.raises(ImportError, match=f"need transformers>={wanted}, but transformers {found} is installed"):
            check_requirements({"transformers": wanted})


def test_what_remote_code_needs_is_what_the_package_needs():
    requirements = {}
    for line in importlib.metadata.requires("atlas-hf"):
        if match := re.fullmatch(r"(torch|transformers)[^;]*>=([\d.]+)[^;]*", line):
            requirements[match[1]] = match[2]
    assert requirements == LOWEST


def test_preparing_is_explicit_and_whole(tiny_model, tmp_path):
    model = tiny_model()
    model.save_pretrained(tmp_path / "plain")
    assert not list((tmp_path / "plain").glob("*.py"))
    save_for_hub(model, tmp_path / "shared")
    model.save_pretrained(tmp_path / "afterwards")
    assert not list((tmp_path / "afterwards").glob("*.py"))
    assert "auto_map" not in json.loads((tmp_path / "afterwards" / "config.json").read_text())
    prepare_for_hub(model)
    model.save_pretrained(tmp_path / "prepared")
    for folder in ("shared", "prepared"):
        files = {path.name for path in (tmp_path / folder).glob("*.py")}
        assert {"modeling_atlas.py", "configuration_atlas.py", "cache_atlas.py", "requirements_atlas.py"} <= files
        found = json.loads((tmp_path / folder / "config.json").read_text())["auto_map"]
        assert found.keys() == CLASSES.keys()
        for factory, place in found.items():
            file, name = place.split(".")
            assert name == CLASSES[factory].__name__
            assert f"class {name}(" in (tmp_path / folder / f"{file}.py").read_text()
    save_for_hub(model, tmp_path / "bare", with_code=False)
    assert not list((tmp_path / "bare").glob("*.py"))
    assert "auto_map" not in json.loads((tmp_path / "bare" / "config.json").read_text())
    assert model.config.auto_map.keys() == CLASSES.keys()


def test_loaded_by_the_package_a_repository_with_code_is_like_any_other(tiny_model, tmp_path):
    save_for_hub(tiny_model(), tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(model) is AtlasForCausalLM
    model.save_pretrained(tmp_path / "again")


def test_other_models_are_refused(tiny_model):
    class Own(AtlasForCausalLM):
        pass

    with pytest.raises(TypeError, match=r"Own is none of atlas_hf's models \(AtlasModel, AtlasForCausalLM"):
        prepare_for_hub(Own(tiny_model().config))


def test_cards_give_the_figures_and_the_right_example(tiny_model):
    model = tiny_model()
    card = model_card(model, "me/tiny", with_tokenizer=False)
    assert f"| parameters | {model.num_parameters():,} |" in card.text
    for figure in ("| width | 16 |", "| chunk | 4 tokens |", "muon, at every 4 tokens", "`transformers>=5.24`"):
        assert figure in card.text
    assert 'AutoModelForCausalLM.from_pretrained("me/tiny", trust_remote_code=True)' in card.text
    assert card.data.tags[-1] == "custom_code"
    classifier = AtlasForSequenceClassification(model.config)
    card = model_card(classifier, "me/tiny", with_code=False)
    assert card.data.pipeline_tag == "text-classification"
    assert 'AutoModelForSequenceClassification.from_pretrained("me/tiny")' in card.text
    assert "import atlas_hf" in card.text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("there", "--model", "original"), "there is not empty: name another folder\n"),
        (("new", "--model", "nowhere"), "model nowhere is not a folder"),
        (("new", "--model", "original", "--repo-id", "a/b/c"), "--repo-id a/b/c is no name on the Hub"),
    ],
)
def test_what_cannot_be_exported(expected, tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    shutil.copytree("original", "there")
    assert main(["export", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
    assert not (tmp_path / "new.partial").exists()
