"""What `test_transformers_common.py` runs in a process of its own: transformers' common tests on the Atlas classes.

`tests.test_modeling_common` and `tests.test_configuration_common` come from the source distribution of the installed
transformers; they are fetched, never kept in this repository.
"""

import unittest

import torch
from tests.generation.test_utils import GenerationTesterMixin
from tests.test_configuration_common import ConfigTester
from tests.test_modeling_common import ModelTesterMixin, ids_tensor, random_attention_mask

from atlas_hf import (
    AtlasConfig,
    AtlasForCausalLM,
    AtlasForSequenceClassification,
    AtlasForTokenClassification,
    AtlasModel,
)

torch.set_num_threads(1)


class AtlasModelTester:
    """A small model and inputs for it, under the names that the mixins read."""

    batch_size, seq_length, is_training = 3, 7, True
    vocab_size, hidden_size, num_hidden_layers, num_attention_heads = 67, 32, 2, 4

    def get_config(self) -> AtlasConfig:
        return AtlasConfig.atlas(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=37,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
            chunk_size=4,
            omega_window=2,
            feature_rank=4,
            residual_scale=0.5,
            pad_token_id=0,
        )

    def prepare_config_and_inputs_for_common(self):
        inputs = {
            "input_ids": ids_tensor([self.batch_size, self.seq_length], self.vocab_size),
            "attention_mask": random_attention_mask([self.batch_size, self.seq_length]),
        }
        return self.get_config(), inputs


# The distribution has no generation tests, and the mixin's stand-in is empty: `test_generation.py` is there for them.
class AtlasCommonTest(ModelTesterMixin, GenerationTesterMixin, unittest.TestCase):
    all_model_classes = (
        AtlasModel,
        AtlasForCausalLM,
        AtlasForSequenceClassification,
        AtlasForTokenClassification,
    )
    has_attentions = False

    def setUp(self):
        self.model_tester = AtlasModelTester()
        self.config_tester = ConfigTester(self, config_class=AtlasConfig, hidden_size=32, num_attention_heads=4)

    def test_config(self):
        self.config_tester.run_common_tests()
