"""Whether vLLM's decode steps of one and two sequences run the engine's attention kernel.

The backend is `semisparse.api.vllm_attention`. ``--additional-config '{"semisparse_attention": false}'`` leaves vLLM's
own; ``--attention-backend CUSTOM`` takes it for every model.
"""

from __future__ import annotations

import torch
import vllm
from vllm import envs
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from semisparse.integrations.vllm.settings import ATTENTION, wants

BACKEND = "semisparse.api.vllm_attention.DecodeAttentionBackend"

MAX_HEAD = 256
"""Values of a head that FlashAttention 3 takes at most."""

logger = init_logger("vllm.semisparse")


def register_attention() -> None:
    """Register the backend with versions of vLLM whose FlashAttention has the interface that it extends.

    By name: importing it takes FlashAttention's compiled code.
    """
    if vllm.__version__.startswith("0.24.") and not AttentionBackendEnum.CUSTOM.is_overridden():
        register_backend(AttentionBackendEnum.CUSTOM, BACKEND)


def choose_attention(vllm_config: VllmConfig) -> bool:
    """Let vLLM take the backend where vLLM would take FlashAttention on a Hopper GPU; return whether.

    vLLM asks for its backend after that for a layer's linear layers. It refuses a backend that is named and cannot
    compute a model, so none is named where FlashAttention could not.

    Args:
        vllm_config: changed if the backend is taken.
    Raises:
        InputError: the setting is neither true nor false.
    """
    wanted, custom = wants(vllm_config, ATTENTION, True), AttentionBackendEnum.CUSTOM
    attention, model = vllm_config.attention_config, vllm_config.model_config
    if not wanted or attention.backend is not None or not current_platform.is_cuda():
        return False
    gpu = current_platform.get_device_capability()
    takes = (
        custom.is_overridden()
        and custom.get_path() == BACKEND
        and (gpu.major, gpu.minor) == (9, 0)
        and model.dtype in (torch.float16, torch.bfloat16)
        and not (model.use_mla or model.is_mm_prefix_lm or model.is_encoder_decoder)
        and model.get_head_size() % 8 == 0
        and model.get_head_size() <= MAX_HEAD
        and vllm_config.cache_config.cache_dtype == "auto"
        and not envs.VLLM_BATCH_INVARIANT
    )
    if takes:
        attention.backend = custom
        logger.info("decode steps of one and two sequences run semisparse's attention kernel")
    return takes
