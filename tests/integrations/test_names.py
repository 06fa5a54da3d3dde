"""Names on disk and in the model."""

import pytest
from transformers.core_model_loading import WeightRenaming

import semisparse.integrations.transformers  # noqa: F401 - transformers imports it
from semisparse.integrations import names
from tests.models import random_model


def test_a_name_of_the_model_that_is_renamed_to_none_of_it_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in transformers: DeepSeek-V4 renames `.norm.` to `.kv_norm.`, and its final norm is `model.norm`."""
    renaming = WeightRenaming(source_patterns=r"\.norm\.", target_patterns=r".kv_norm.")
    other = WeightRenaming(source_patterns=r"\.mixer\.", target_patterns=r".self_attn.")
    monkeypatch.setattr(names, "get_model_conversion_mapping", lambda model: [renaming, other])
    keys = {
        "model.norm.weight": "model.norm.weight",
        "model.layers.0.mixer.q_proj.weight": "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.mixer.q_proj.masks": "model.layers.0.self_attn.q_proj.masks",
        "lm_head.weight": "lm_head.weight",
    }
    assert names.model_keys(random_model("llama"), keys) == keys
