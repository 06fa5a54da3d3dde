"""vLLM's `QuantizationConfig` of a semisparse checkpoint: how each layer is computed, and which are refused."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.platforms import current_platform

from semisparse.checkpoint import METHOD, layer_bytes_on, read_block
from semisparse.errors import InputError
from semisparse.integrations.vllm.attention import choose_attention
from semisparse.integrations.vllm.experts import SemisparseExpertsMethod, is_of_expert, refusal
from semisparse.integrations.vllm.fusion import install_fusion
from semisparse.integrations.vllm.linear import SemisparseLinearMethod
from semisparse.integrations.vllm.settings import KEEP_DENSE, layers_with_copies, refuse_options


class SemisparseVllmConfig(QuantizationConfig):
    """vLLM's `QuantizationConfig` of a semisparse checkpoint.

    Args:
        layers: the checkpoint's layers by module name, as `read_block` returns them.
    """

    def __init__(self, layers: Mapping[str, Any]) -> None:
        super().__init__()
        self.layers = dict(layers)
        self._fits = False
        self._fuses = False
        self._has_attention = False
        self._copied: frozenset[str] = frozenset()

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> SemisparseVllmConfig:
        """Return the config of a checkpoint's ``quantization_config``. vLLM calls this before it allocates GPU memory.

        Raises:
            CheckpointError: ``config`` is unreadable, or of another version.
        """
        return cls(read_block(config))

    def get_name(self) -> str:
        return METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """Return 80: compute capability 8.0, which the CUDA kernels need. vLLM refuses older GPUs."""
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        """Return no files: everything is in config.json."""
        return []

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Rename the layers as vLLM renames the checkpoint's modules."""
        self.layers = hf_to_vllm_mapper.apply_dict(self.layers)

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Return the method for a linear layer, ours if it is compressed, else vLLM's; None for any other layer.

        Raises:
            InputError: a layer that is neither linear nor experts is compressed; only some weights of a fused layer
                are; experts cannot be served here; an option is refused; or the compressed layers do not fit the GPU.
        """
        self._choose_attention()
        if isinstance(layer, RoutedExperts):
            return self._experts_method(layer, prefix)
        if not isinstance(layer, LinearBase):
            self._refuse_compressed(layer, prefix)
            return None
        names = self._checkpoint_names(prefix)
        compressed = [name for name in names if name in self.layers]
        if not compressed:
            return UnquantizedLinearMethod()
        if len(compressed) < len(names):
            raise InputError(
                f"vLLM fuses {', '.join(names)} into one layer, of which only {', '.join(compressed)} are compressed: "
                "compress all, or add all to the recipe's ignore list"
            )
        tokens = self._checked_tokens()
        copied = [name for name in names if name in self._copied]
        if 0 < len(copied) < len(names):
            raise InputError(
                f"vLLM fuses {', '.join(names)} into one layer, of which {KEEP_DENSE} matches only "
                f"{', '.join(copied)}: match all or none"
            )
        packed = {name: self.layers[name] for name in names}
        return SemisparseLinearMethod(packed, tokens, self._fuses, bool(copied))

    def _experts_method(self, layer: RoutedExperts, prefix: str) -> QuantizeMethodBase | None:
        """Return the method for a layer's experts; None if they are dense."""
        inside = {
            name.removeprefix(f"{prefix}."): packed
            for name, packed in self.layers.items()
            if name.startswith(f"{prefix}.")
        }
        if not inside:
            return None
        reason = refusal(layer)
        if reason is not None:
            raise InputError(f"{prefix}.{next(iter(inside))} is compressed, but {reason}; or ignore '*.experts'")
        return SemisparseExpertsMethod(layer, inside, self._checked_tokens())

    def _choose_attention(self) -> None:
        """Choose the attention once, for the first layer, compressed or not: all layers of a model get the same."""
        if not self._has_attention:
            choose_attention(get_current_vllm_config())
            self._has_attention = True

    def _checked_tokens(self) -> int:
        """Check what vLLM was asked for, install the fusion pass, and return the tokens per step.

        The first two happen once, for the first compressed layer: vLLM asks for its method before it compiles.
        """
        vllm_config = get_current_vllm_config()
        if not self._fits:
            refuse_options(vllm_config)
            self._copied = layers_with_copies(vllm_config, [name for name in self.layers if not is_of_expert(name)])
            self._check_memory(vllm_config)
            self._fuses = install_fusion(vllm_config, {layer.spec.format for layer in self.layers.values()})
        return int(vllm_config.scheduler_config.max_num_batched_tokens)

    def _checkpoint_names(self, prefix: str) -> list[str]:
        """Return the names of the checkpoint's layers that make up vLLM's layer ``prefix``.

        They are several where vLLM fuses layers that are stored separately.
        """
        parent, _, last = prefix.rpartition(".")
        if prefix in self.layers or last not in self.packed_modules_mapping:
            return [prefix]
        return [f"{parent}.{name}" if parent else name for name in self.packed_modules_mapping[last]]

    def _refuse_compressed(self, layer: Any, prefix: str) -> None:
        inside = [name for name in self.layers if name == prefix or name.startswith(f"{prefix}.")]
        if inside:
            raise InputError(
                f"{inside[0]} is compressed, but belongs to a {type(layer).__name__} of vLLM ({prefix}); the adapter "
                "serves linear layers and experts, not the LM head: add it to the recipe's ignore list"
            )

    def _check_memory(self, vllm_config: VllmConfig) -> None:
        """Refuse compressed layers that take more of a GPU than vLLM may use, before they are allocated.

        A rank is taken to hold an equal share of them, as they are on this GPU, and of their dense copies. Layers that
        are not compressed are not counted. Nothing is refused off CUDA.
        """
        if current_platform.is_cuda():
            parallel = vllm_config.parallel_config
            ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
            memory = current_platform.get_device_total_memory()
            allowed, option = _allowed_memory(vllm_config.cache_config, memory)
            width = vllm_config.model_config.dtype.itemsize
            copies = sum(math.prod(self.layers[name].shape) * width for name in self._copied)
            capability = current_platform.get_device_capability()
            packed = layer_bytes_on(self.layers.values(), (capability.major, capability.minor))
            needed = (packed + copies) / ranks
            if needed > allowed:
                what = "the compressed layers" + (" and their dense copies" if copies else "")
                raise InputError(
                    f"{what} take {needed / 1e9:.1f} GB on each of {ranks} GPUs, and vLLM may use "
                    f"{allowed / 1e9:.1f} of {memory / 1e9:.1f} GB for them ({option}): serve them on more GPUs "
                    "(--tensor-parallel-size) or on larger ones"
                )
        self._fits = True


def _allowed_memory(cache_config: Any, memory: int) -> tuple[float, str]:
    """Return the bytes of a GPU that layers may take, and the option of vLLM that says so.

    Args:
        cache_config: vLLM's; with a KV cache of given size, vLLM ignores the share of the memory that it may use.
        memory: bytes of the GPU.
    """
    if cache_config.kv_cache_memory_bytes:
        return max(0, memory - cache_config.kv_cache_memory_bytes), "--kv-cache-memory-bytes"
    return cache_config.gpu_memory_utilization * memory, "--gpu-memory-utilization"
