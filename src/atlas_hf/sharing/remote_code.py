"""Repositories that load with `trust_remote_code=True` where atlas_hf is not installed."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from atlas_hf.modeling.configuration_atlas import AtlasConfig
from atlas_hf.modeling.modeling_atlas import (
    AtlasForCausalLM,
    AtlasForSequenceClassification,
    AtlasForTokenClassification,
    AtlasModel,
)
from atlas_hf.sharing.model_card import model_card

CLASSES = {
    "AutoConfig": AtlasConfig,
    "AutoModel": AtlasModel,
    "AutoModelForCausalLM": AtlasForCausalLM,
    "AutoModelForSequenceClassification": AtlasForSequenceClassification,
    "AutoModelForTokenClassification": AtlasForTokenClassification,
}


def auto_map() -> dict[str, str]:
    """Auto class -> `file.Class`, for every class: transformers itself enters only those of the model that is saved."""
    return {factory: f"{kind.__module__.rpartition('.')[2]}.{kind.__name__}" for factory, kind in CLASSES.items()}


def prepare_for_hub(model: PreTrainedModel) -> None:
    """Let `model.push_to_hub` and `model.save_pretrained` bring the code along, for every Auto class.

    From then on every Atlas model of this process that is saved does, checkpoints of a training run included: call it just
    before sharing, or use `save_for_hub`, which leaves nothing behind.

    Raises:
        TypeError: the model is none of this package's.
    """
    if type(model) not in CLASSES.values():
        raise TypeError(
            f"{type(model).__module__}.{type(model).__name__} is none of atlas_hf's models "
            f"({', '.join(kind.__name__ for kind in CLASSES.values() if kind is not AtlasConfig)}): unwrap it first; a model "
            "loaded as remote code already brings its code along"
        )
    for factory, kind in CLASSES.items():
        kind.register_for_auto_class(factory)
    model.config.auto_map = auto_map()


def save_for_hub(
    model: PreTrainedModel,
    folder: str | Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    repo_id: str | None = None,
    with_code: bool = True,
) -> None:
    """Write everything that a repository on the Hub holds: weights, configuration, tokenizer, model card and the code.

    Args:
        repo_id: name that the repository will have, for the card's example.
        with_code: add the modeling files and the `auto_map` that points to them.

    Raises:
        TypeError: `with_code`, and the model is none of this package's.
    """
    folder = Path(folder)
    with _code_travels(model, with_code):
        model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    card = model_card(model, repo_id, with_code=with_code, with_tokenizer=tokenizer is not None)
    card.save(folder / "README.md")


@contextmanager
def _code_travels(model: PreTrainedModel, wanted: bool) -> Iterator[None]:
    """Within the block, saving `model` brings its code along, or not; afterwards all is as before."""
    registered = {kind: kind._auto_class for kind in CLASSES.values()}
    had_map, old_map = hasattr(model.config, "auto_map"), getattr(model.config, "auto_map", None)
    try:
        if wanted:
            prepare_for_hub(model)
        else:
            for kind in registered:
                kind._auto_class = None
            if had_map:
                del model.config.auto_map
        yield
    finally:
        for kind, factory in registered.items():
            kind._auto_class = factory
        if had_map:
            model.config.auto_map = old_map
        elif hasattr(model.config, "auto_map"):
            del model.config.auto_map
