"""Atlas for Transformers: importing this package registers its classes with the Auto factories."""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)
from transformers.models.auto import modeling_auto

from atlas_hf.memory_files import copy_memory, load_memory, save_memory
from atlas_hf.modeling.cache_atlas import AtlasCacheLayer, detach_cache
from atlas_hf.modeling.configuration_atlas import AtlasConfig
from atlas_hf.modeling.modeling_atlas import (
    AtlasForCausalLM,
    AtlasForSequenceClassification,
    AtlasForTokenClassification,
    AtlasModel,
    AtlasPreTrainedModel,
)

__version__ = "0.1.0"

__all__ = [
    "AtlasCacheLayer",
    "AtlasConfig",
    "AtlasForCausalLM",
    "AtlasForSequenceClassification",
    "AtlasForTokenClassification",
    "AtlasModel",
    "AtlasPreTrainedModel",
    "copy_memory",
    "detach_cache",
    "load_memory",
    "save_memory",
]

AutoConfig.register("atlas", AtlasConfig, exist_ok=True)
for _factory, _mapping, _model in (
    (AutoModel, "MODEL_MAPPING_NAMES", AtlasModel),
    (AutoModelForCausalLM, "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", AtlasForCausalLM),
    (
        AutoModelForSequenceClassification,
        "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
        AtlasForSequenceClassification,
    ),
    (AutoModelForTokenClassification, "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES", AtlasForTokenClassification),
):
    _factory.register(AtlasConfig, _model, exist_ok=True)
    # The library's own tests, and tools like them, know models by these tables of names.
    getattr(modeling_auto, _mapping)["atlas"] = _model.__name__
