"""The adapter to vLLM: with semisparse installed, ``vllm serve DIR`` serves a compressed checkpoint.

vLLM calls `register` in every process (entry point ``vllm.general_plugins``).
"""

from __future__ import annotations

import vllm
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, register_quantization_config
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from semisparse.checkpoint import METHOD
from semisparse.integrations.vllm.config import SemisparseVllmConfig
from semisparse.integrations.vllm.experts_runner import register_runner


def register() -> None:
    """Register the quantisation method and the attention backend with vLLM. A second call changes nothing."""
    if METHOD not in QUANTIZATION_METHODS:
        register_quantization_config(METHOD)(SemisparseVllmConfig)
        register_runner()
    # By name: importing it takes FlashAttention's compiled code. Its interface changes between versions.
    if vllm.__version__.startswith("0.24.") and not AttentionBackendEnum.CUSTOM.is_overridden():
        register_backend(AttentionBackendEnum.CUSTOM, "semisparse.api.vllm_attention.DecodeAttentionBackend")


__all__ = ["SemisparseVllmConfig", "register"]
