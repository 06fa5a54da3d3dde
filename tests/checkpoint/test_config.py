"""Bounds on config.json: values of real models pass, values beyond those of any model are refused."""

import pytest

from semisparse.checkpoint import check_sizes
from semisparse.errors import CheckpointError


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "gemma3n", "vocab_size_per_layer_input": 262_144, "num_hidden_layers": 35},
        {"num_hidden_layers": 126, "hidden_size": 16_384, "vocab_size": 256_000, "layer_norm_eps": 1e-5},
        {"n_routed_experts": 384, "max_position_embeddings": 10_485_760, "text_config": {"head_dim": 512}},
    ],
)
def test_sizes_of_real_models_pass(config: dict):
    check_sizes(config, "here")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_hidden_layers": 1025}, "num_hidden_layers is 1025.*expected 0 to 1024"),
        ({"text_config": {"n_experts": 1 << 17}}, "n_experts"),
        ({"hidden_size": 1 << 32}, "hidden_size"),
        ({"num_attention_heads": 0}, "expected 1 to"),
    ],
)
def test_sizes_of_no_model_are_refused(config: dict, message: str):
    with pytest.raises(CheckpointError, match=message):
        check_sizes(config, "here")
