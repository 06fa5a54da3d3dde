"""What a user sets for the adapter in vLLM's ``--additional-config``, and options of vLLM that it cannot serve."""

from __future__ import annotations

from collections.abc import Collection
from fnmatch import fnmatchcase
from typing import Any

from vllm import envs
from vllm.config import VllmConfig
from vllm.platforms import current_platform

from semisparse.checkpoint import METHOD
from semisparse.errors import InputError

FUSION = "semisparse_fusion"
"""false: norms, residuals and SiLU are not fused into packed matmuls."""

ATTENTION = "semisparse_attention"
"""false: decode steps of one and two sequences do not run the engine's attention kernel but vLLM's."""

KEEP_DENSE = "semisparse_keep_dense"
"""Glob patterns of the checkpoint's layers that get dense copies, such as ``["*.down_proj"]`` or ``["*"]``."""

RELOADED = (
    "packed weights cannot be loaded again into a running vLLM, whose CUDA graphs read the first ones: start it anew"
)
"""What is said of a layer whose weights vLLM loads again, after its deeper sleep or for a trainer."""


def refuse_options(vllm_config: VllmConfig) -> None:
    """Refuse options of vLLM that packed layers do not follow, before anything is allocated.

    Raises:
        InputError: one of them is set.
    """
    offload, load_format = vllm_config.offload_config, vllm_config.load_config.load_format
    known = (ATTENTION, FUSION, KEEP_DENSE)
    additional = vllm_config.additional_config if isinstance(vllm_config.additional_config, dict) else {}
    unknown = [name for name in additional if name.startswith(METHOD) and name not in known]
    if unknown:
        raise InputError(f"--additional-config: {', '.join(unknown)} is unknown, expected {', '.join(known)}")
    if vllm_config.lora_config is not None:
        raise InputError(
            "LoRA on packed layers is not supported: serve without --enable-lora, or merge the adapter into the dense "
            "model before it is compressed"
        )
    if load_format in ("dummy", "sharded_state"):
        raise InputError(
            f"--load-format {load_format}: packed layers are loaded from the tensors of a compressed directory only: "
            "serve without this option"
        )
    if offload.uva.cpu_offload_gb or offload.prefetch.offload_group_size:
        raise InputError(
            "packed layers stay on the GPU: serve without --cpu-offload-gb and --offload-group-size, or on more GPUs "
            "(--tensor-parallel-size)"
        )
    if envs.VLLM_BATCH_INVARIANT and current_platform.is_cuda():
        raise InputError(
            "VLLM_BATCH_INVARIANT=1: packed matmuls of other numbers of tokens sum in another order; unset it"
        )


def wants(vllm_config: VllmConfig, name: str, default: bool) -> bool:
    """Return a setting that is true or false.

    Args:
        vllm_config: vLLM's.
        name: of the setting.
        default: its value where the user sets none.
    Raises:
        InputError: it is neither.
    """
    wanted = _setting(vllm_config, name, default)
    if not isinstance(wanted, bool):
        raise InputError(f"--additional-config: {name} is {wanted!r}, expected true or false")
    return wanted


def layers_with_copies(vllm_config: VllmConfig, layers: Collection[str]) -> frozenset[str]:
    """Return which of the compressed layers get dense copies.

    Args:
        vllm_config: without the setting there are none.
        layers: their names.
    Raises:
        InputError: the setting is no list of patterns, or a pattern matches no layer.
    """
    patterns = _setting(vllm_config, KEEP_DENSE, [])
    if not isinstance(patterns, list) or not all(isinstance(pattern, str) for pattern in patterns):
        raise InputError(f'--additional-config: {KEEP_DENSE} is {patterns!r}, expected a list of patterns: ["*"]')
    unmatched = [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in layers)]
    if unmatched:
        raise InputError(
            f"--additional-config: {KEEP_DENSE} has {', '.join(unmatched)}, which matches no compressed layer; those "
            f"of experts have no copies; an example of a name is {next(iter(layers), 'missing')}"
        )
    return frozenset(name for name in layers if any(fnmatchcase(name, pattern) for pattern in patterns))


def _setting(vllm_config: VllmConfig, name: str, default: Any) -> Any:
    """Return a value of ``additional_config``, which may also be an object of another plugin."""
    additional = vllm_config.additional_config
    return additional.get(name, default) if isinstance(additional, dict) else default
