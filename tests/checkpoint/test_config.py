"""Bounds on config.json: values of real models pass, values beyond those of any model are refused."""

import pytest

from semisparse.checkpoint import check_sizes, read_block
from semisparse.errors import CheckpointError


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "gemma3n", "vocab_size_per_layer_input": 262_144, "num_hidden_layers": 35},
        {"num_hidden_layers": 126, "hidden_size": 16_384, "vocab_size": 256_000, "layer_norm_eps": 1e-5},
        {"n_routed_experts": 384, "max_position_embeddings": 10_485_760, "text_config": {"head_dim": 512}},
        {"model_type": "llava", "vision_feature_layer": -2, "ignore_label_id": -100, "head_in_index": -1},
        {"model_type": "granite_swa", "layer_rope_theta": [10000.0, 0]},
        {"num_experts": 1, "num_experts_per_tok": 2, "n_routed_experts": None, "moe_topk": [1, 8]},
        {"num_local_experts": 16, "num_experts_per_tok": 16, "text_config": {"num_experts": 8, "moe_topk": [1, 8]}},
        {"moe_num_experts": [64, 32], "moe_k": [40, 6], "thinker_config": {"text_config": {"num_experts_per_tok": 8}}},
        {"sliding_window": 4096, "max_window_layers": 70, "use_sliding_window": False, "bos_token_id": 1 << 40},
        {"max_relative_positions": -1, "pooler_hidden_size": 0, "time_step_limit": [0.0, float("inf")]},
    ],
)
def test_sizes_of_real_models_pass(config: dict):
    check_sizes(config, "here")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_hidden_layers": 1025}, "num_hidden_layers is 1025 in config.json, expected 1 to 1024$"),
        ({"text_config": {"n_experts": 1 << 17}}, "n_experts is 131072 in config.json, expected -100 to 65536$"),
        ({"hidden_size": (1 << 31) + 1}, "hidden_size is 2147483649 in config.json, expected 1 to 2147483648$"),
        ({"num_attention_heads": 0}, "expected 1 to"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1 in config.json, expected 1 to 1024$"),
        ({"intermediate_size": -5}, "intermediate_size is -5 in config.json, expected -1 to 2147483648$"),
        ({"hidden_size": 10**400}, r"hidden_size is 10{23}\.\.\. \(401 characters\) in config.json, expected 1 to"),
        ({"sliding_window": 1 << 70}, "sliding_window is 1180591620717411303424 in config.json, expected -1 to"),
        ({"bos_token_id": 1 << 63}, "bos_token_id is 9223372036854775808 in config.json, expected -9223"),
        ({"num_experts": 8, "num_experts_per_tok": 9}, "num_experts_per_tok is 9 in config.json, expected 0 to 8"),
        ({"text_config": {"num_experts": 8, "moe_topk": [1, 9]}}, "moe_topk is 9 in config.json, expected 0 to 8"),
        ({"a_config": {"b_config": {"num_experts": 8, "moe_k": 9}}}, "moe_k is 9 in config.json, expected 0 to 8"),
        ({"blocks": [{"n_routed_experts": 8, "moe_top_k": 9}]}, "moe_top_k is 9 in config.json, expected 0 to 8"),
        ({"moe_num_experts": [64, 32], "moe_k": 33}, "moe_k is 33 in config.json, expected 0 to 32"),
        ({"moe_num_experts": [64, 32], "moe_k": [40, 33]}, "moe_k is 33 in config.json, expected 0 to 32"),
        ({"num_experts_per_tok": -2}, "num_experts_per_tok is -2 in config.json, expected 0 or more$"),
        ({"hidden_size": float("nan")}, "hidden_size is nan in config.json, expected 1 to"),
        ({"hidden_size": float("inf")}, "hidden_size is inf in config.json, expected 1 to"),
        ({"rope_parameters": {"rope_theta": float("nan")}}, "rope_theta is nan in config.json, expected a number$"),
    ],
)
def test_sizes_of_no_model_are_refused(config: dict, message: str):
    with pytest.raises(CheckpointError, match=message):
        check_sizes(config, "here")


def test_layers_with_numbers_in_their_names_come_in_their_order():
    entry = {"format": "bitmask", "version": 1, "pattern": "32:64", "shape": [4, 64], "dtype": "float16", "params": {}}
    names = ["layers.9.up", "layers.10.up", "layers." + "9" * 5000, "layers.down"]
    block = {"quant_method": "semisparse", "version": 1, "layers": dict.fromkeys(reversed(names), entry)}
    assert list(read_block(block)) == [names[3], *names[:3]]
