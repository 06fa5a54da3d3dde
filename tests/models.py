"""Tiny random models of every architecture family that semisparse names, and a tokenizer to go with them."""

import copy
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

TINY = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 256,
}
"""Fields of the config of a small architecture, for `semisparse.bench.shapes.ARCHITECTURES`."""

SHARED = Path(__file__).parents[1].parent / "shared"
"""Real models and text, where a checkout has them beside it."""

VOCABULARY = 259
_COMMON = {"vocab_size": VOCABULARY, "max_position_embeddings": 64}
_LLAMA = {
    **_COMMON,
    "hidden_size": 24,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}

CONFIGS = {
    "llama": LlamaConfig(**_LLAMA),
    "llama-tied": LlamaConfig(**_LLAMA, tie_word_embeddings=True),
    "llama-bias": LlamaConfig(**_LLAMA, attention_bias=True, mlp_bias=True),
    "qwen2": Qwen2Config(**_LLAMA),
    "qwen3": Qwen3Config(**_LLAMA, head_dim=8),
    "mistral": MistralConfig(**_LLAMA, sliding_window=16),
    "opt": OPTConfig(
        **_COMMON, hidden_size=24, word_embed_proj_dim=24, ffn_dim=44, num_hidden_layers=2, num_attention_heads=4
    ),
    "gpt2": GPT2Config(vocab_size=VOCABULARY, n_positions=64, n_embd=24, n_layer=2, n_head=4),
}


def random_model(architecture: str, dtype: torch.dtype = torch.bfloat16, **settings: int) -> PreTrainedModel:
    """Return a family's model; ``settings`` are of its config."""
    torch.manual_seed(0)
    config = copy.deepcopy(CONFIGS[architecture])
    for name, value in settings.items():
        setattr(config, name, value)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.5)  # zero biases would hide a bias that was lost
    return model


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per byte, and BOS 256."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: i for i, character in enumerate(alphabet)} | {"<s>": 256, "</s>": 257, "<unk>": 258}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
