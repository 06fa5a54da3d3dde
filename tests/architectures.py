"""Tiny random models of the architectures that people use, one config each."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    PreTrainedModel,
)

from tests.models import VOCABULARY

_DECODER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": None,
}
_HEADS: dict[str, Any] = {**_DECODER, "head_dim": 8}
_NEOX = {key: value for key, value in _DECODER.items() if key != "num_key_value_heads"}
_VISION: dict[str, Any] = {
    "hidden_size": 96,  # more weights than the text decoder
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
_ROPE_SECTIONS = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
_QWEN_VISION: dict[str, Any] = {"depth": 3, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2}

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("llama", _DECODER),
    "Llama-4 text": (
        "llama4_text",
        {
            **_HEADS,
            "intermediate_size_mlp": 48,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "attn_temperature_tuning": False,
        },
    ),
    "Llama-4": (
        "llama4",
        {
            "text_config": {**_HEADS, "intermediate_size_mlp": 48, "num_local_experts": 4},
            "vision_config": {
                **_VISION,
                "vision_output_dim": 32,
                "projector_input_dim": 32,
                "projector_output_dim": 32,
            },
            "image_token_index": 258,
            "boi_token_index": 256,
            "eoi_token_index": 257,
        },
    ),
    "Qwen2": ("qwen2", _DECODER),
    "Qwen3": ("qwen3", _HEADS),
    "Qwen3-MoE": (
        "qwen3_moe",
        {**_HEADS, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
    "Qwen3-Next": (
        "qwen3_next",
        {
            **_HEADS,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    "Mixtral": ("mixtral", {**_DECODER, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "GPT-OSS": ("gpt_oss", {**_HEADS, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "DeepSeek-V3": (
        "deepseek_v3",
        {
            **_DECODER,
            "num_key_value_heads": 4,
            "moe_intermediate_size": 16,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
        },
    ),
    "Gemma-2": ("gemma2", _HEADS),
    "Gemma-3 text": ("gemma3_text", _HEADS),
    "Gemma-3": (
        "gemma3",
        {
            "text_config": _HEADS,
            "vision_config": _VISION,
            "mm_tokens_per_image": 4,
            "image_token_index": 258,
            "boi_token_index": 256,
            "eoi_token_index": 257,
        },
    ),
    "Phi-3": ("phi3", _DECODER),
    "Phi-3.5-MoE": ("phimoe", {**_DECODER, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "Mistral": ("mistral", _DECODER),
    "Apertus": ("apertus", {**_DECODER, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
    "OPT": (
        "opt",
        {**_NEOX, "ffn_dim": 48, "word_embed_proj_dim": 32, "pad_token_id": 1},
    ),
    "GPT-2": ("gpt2", {"vocab_size": VOCABULARY, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}),
    "GPT-NeoX": ("gpt_neox", _NEOX),
    "Falcon": ("falcon", {**_NEOX, "alibi": False, "new_decoder_architecture": False}),
    "BLOOM": ("bloom", {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "OLMo-2": ("olmo2", _DECODER),
    "OLMoE": ("olmoe", {**_DECODER, "num_experts": 4, "num_experts_per_tok": 2}),
    "Granite-MoE": ("granitemoe", {**_DECODER, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "Cohere-2": ("cohere2", _HEADS),
    "StarCoder-2": ("starcoder2", _DECODER),
    "Qwen2-VL": (
        "qwen2_vl",
        {
            "text_config": {**_DECODER, "rope_parameters": _ROPE_SECTIONS},
            "vision_config": {**_QWEN_VISION, "embed_dim": 64, "hidden_size": 32},
        },
    ),
    "Qwen3-VL": (
        "qwen3_vl",
        {
            "text_config": {**_HEADS, "rope_parameters": _ROPE_SECTIONS},
            "vision_config": {
                **_QWEN_VISION,
                "hidden_size": 64,
                "intermediate_size": 128,
                "out_hidden_size": 32,
                "num_position_embeddings": 16,
                "deepstack_visual_indexes": [0],
            },
        },
    ),
    "LLaVA": (
        "llava",
        {
            "text_config": {**_DECODER, "model_type": "llama"},
            "vision_config": {**_VISION, "model_type": "clip_vision_model", "projection_dim": 32},
            "image_token_index": 258,
        },
    ),
    "LFM2": ("lfm2", {**_DECODER, "layer_types": ["conv", "full_attention"]}),
    "Bamba": (
        "bamba",
        {
            **_DECODER,
            "attn_layer_indices": [1],
            "mamba_n_heads": 4,
            "mamba_d_head": 16,
            "mamba_d_state": 8,
            "mamba_chunk_size": 16,
        },
    ),
    "MiniMax": ("minimax", {**_HEADS, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "ModernBERT decoder": ("modernbert-decoder", {**_NEOX, "pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2}),
    "BERT": (
        "bert",
        {key: _DECODER[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")},
    ),
    "T5": ("t5", {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}),
    "Mamba": ("mamba", {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}),
}
"""transformers' ``model_type`` and the settings of its config, by the name that people use."""

MULTIMODAL = ("Llama-4", "Gemma-3", "Qwen2-VL", "Qwen3-VL", "LLaVA")


def tiny_model(architecture: str, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    """Return a model with random weights; norms, biases and routers are random, too.

    Args:
        architecture: a key of `CONFIGS`.
        dtype: of the weights.
        changes: of the config's settings.
    """
    torch.manual_seed(0)
    model_type, settings = CONFIGS[architecture]
    config = CONFIG_MAPPING[model_type](**settings | changes)
    auto = AutoModelForImageTextToText if architecture in MULTIMODAL else AutoModelForCausalLM
    auto = AutoModelForSeq2SeqLM if architecture == "T5" else auto
    model = auto.from_config(config, dtype=dtype).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, mean=0.5, std=0.2)
        else:
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return model
