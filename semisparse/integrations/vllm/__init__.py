"""The adapter to vLLM: with semisparse installed, ``vllm serve DIR`` serves a compressed checkpoint.

vLLM calls `register` in every process (entry point ``vllm.general_plugins``).
"""

from __future__ import annotations

from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, register_quantization_config

from semisparse.checkpoint import METHOD
from semisparse.integrations.vllm.attention import register_attention
from semisparse.integrations.vllm.config import SemisparseVllmConfig
from semisparse.integrations.vllm.experts_runner import register_runner


def register() -> None:
    """Register the quantisation method and the attention backend with vLLM. A second call changes nothing."""
    if METHOD not in QUANTIZATION_METHODS:
        register_quantization_config(METHOD)(SemisparseVllmConfig)
        register_runner()
    register_attention()


__all__ = ["SemisparseVllmConfig", "register"]
