"""The README of a model's repository: what it is, what it needs, how to use it."""

from huggingface_hub import ModelCard, ModelCardData
from transformers import PreTrainedModel

from atlas_hf.modeling.model_statistics import flops_per_token, state_bytes
from atlas_hf.modeling.requirements_atlas import LOWEST

PAPER = "https://arxiv.org/abs/2505.23735"
PACKAGE = "atlas_hf"

FACTORIES = {
    "AtlasForCausalLM": "AutoModelForCausalLM",
    "AtlasForSequenceClassification": "AutoModelForSequenceClassification",
    "AtlasForTokenClassification": "AutoModelForTokenClassification",
}
TASKS = {
    "AutoModel": "feature-extraction",
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
}

_WITH_TOKENIZER = """\
tokenizer = AutoTokenizer.from_pretrained({name!r}{trust})
inputs = tokenizer("Once upon a time", return_tensors="pt", return_token_type_ids=False)
written = model.generate(**inputs, max_new_tokens=20, do_sample=False)
print(tokenizer.decode(written[0], skip_special_tokens=True))
"""
_WITHOUT_TOKENIZER = """\
tokens = torch.tensor([[3, 4, 5]])
print(model.generate(tokens, max_new_tokens=20, do_sample=False))
"""
_WITH_HEAD = """\
tokens = torch.tensor([[3, 4, 5]])
print(model(tokens)[0].shape)
"""


def model_card(
    model: PreTrainedModel, repo_id: str | None = None, *, with_code: bool = True, with_tokenizer: bool = True
) -> ModelCard:
    """A card with the configuration's key figures and an example that runs as it stands.

    `model_card(model, "user/name").push_to_hub("user/name")` puts it into a repository.

    Args:
        repo_id: name of the repository in the example; `None`: the current folder.
        with_code: whether the repository brings the code along (`prepare_for_hub`, `save_for_hub`).
        with_tokenizer: whether a tokenizer lies beside the model.
    """
    factory = FACTORIES.get(type(model).__name__, "AutoModel")
    causal = factory == "AutoModelForCausalLM"
    data = ModelCardData(
        library_name="transformers",
        pipeline_tag=TASKS[factory],
        tags=["atlas", "recurrent-memory", "arxiv:2505.23735", *(["custom_code"] if with_code else [])],
    )
    example = _example(repo_id, factory, with_code, with_tokenizer and causal)
    needs = ", ".join(f"`{package}>={version}`" for package, version in LOWEST.items())
    if with_code:
        needed = f"The code lies in the repository and needs {needs}; read it before you trust it. Where `{PACKAGE}` is"
        needed += " installed and imported, that package's own code is used instead."
    else:
        needed = f"Needs the package `{PACKAGE}`, and {needs}."
    title = (repo_id or type(model).__name__).rpartition("/")[2]
    figures = "\n".join(f"| {name} | {value} |" for name, value in _figures(model).items())
    text = f"""---
{data.to_yaml()}
---

# {title}

An [ATLAS]({PAPER}) model: its layers rewrite a small network, the memory, as the text goes by, so that its cache does not
grow with the context.

## Use it

{needed}

```python
{example}```

## Figures

| | |
|---|---|
{figures}
"""
    return ModelCard(text)


def _example(repo_id: str | None, factory: str, with_code: bool, with_tokenizer: bool) -> str:
    name = repo_id or "."
    imports = [] if with_tokenizer else ["import torch"]
    imports.append(f"from transformers import {factory}{', AutoTokenizer' if with_tokenizer else ''}")
    if not with_code:
        imports.append(f"\nimport {PACKAGE}  # makes the Auto classes know Atlas")
    trust = ", trust_remote_code=True" if with_code else ""
    lines = f"model = {factory}.from_pretrained({name!r}{trust})\n"
    if with_tokenizer:
        lines += _WITH_TOKENIZER.format(name=name, trust=trust)
    else:
        lines += _WITHOUT_TOKENIZER if factory == "AutoModelForCausalLM" else _WITH_HEAD
    return "\n".join(imports) + "\n\n" + lines.replace("'", '"')


def _figures(model: PreTrainedModel) -> dict[str, str]:
    config = model.config
    features = "none" if config.feature_degree == 1 else f"degree {config.feature_degree}, rank {config.feature_rank}"
    muon = f", at every {config.muon_interval} tokens" if config.rule == "muon" else ""
    return {
        "parameters": f"{model.num_parameters():,}",
        "weights' type": str(model.dtype).removeprefix("torch."),
        "blocks": str(config.num_hidden_layers),
        "width": str(config.hidden_size),
        "heads": f"{config.num_attention_heads} of width {config.head_dim}",
        "vocabulary": str(config.vocab_size),
        "memory": f"{config.memory}, expansion {config.memory_expansion}",
        "inner optimiser": f"{config.rule}{muon}, momentum {config.momentum}",
        "window": f"{config.omega_window} tokens",
        "chunk": f"{config.chunk_size} tokens",
        "features": features,
        "state of a sequence": f"{state_bytes(config):,} bytes, whatever its length",
        "arithmetic": f"{flops_per_token(config):,} FLOPs per token (forward)",
        "trained at": f"{config.max_position_embeddings} tokens",
    }
