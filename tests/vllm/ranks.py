"""What each rank of a tensor-parallel group runs: vLLM's own loader on a CPU, and its linear layers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests.forked import on_ranks


def prepare() -> None:
    """Let vLLM run on a CPU without its compiled kernels: linear layers need none."""
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    import vllm.platforms
    from vllm.model_executor.layers import utils
    from vllm.platforms.cpu import CpuPlatform

    utils.check_cpu_sgl_kernel = lambda *shape: (
        False
    )  # on a CPU with AMX vLLM would take a compiled kernel for the head
    vllm.platforms._current_platform = CpuPlatform()
    torch.accelerator.empty_cache = lambda: None  # It asks for an accelerator; vLLM's loader calls it always.


def start(rank: int, world: int, rendezvous: Path) -> None:
    """Join the group over gloo, with the plugins loaded as vLLM loads them in every process."""
    prepare()
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(world, rank, f"file://{rendezvous}", rank, "gloo")
        initialize_model_parallel(world)


def load(directory: Path, dtype: str = "float32", **settings: Any) -> Any:
    """Load a model as ``vllm serve`` does."""
    return load_with_config(directory, dtype, **settings)[0]


def load_with_config(
    directory: Path, dtype: str = "float32", custom_ops: Sequence[str] = (), additional_config: Any = None
) -> tuple[Any, Any]:
    """Load a model as ``vllm serve`` does, and return it with vLLM's config.

    Args:
        directory: the checkpoint.
        dtype: of activations.
        custom_ops: vLLM's setting, of which ``none`` takes the code in torch of its operators.
        additional_config: vLLM's setting.
    """
    from vllm.config import (
        CompilationConfig,
        DeviceConfig,
        LoadConfig,
        ModelConfig,
        VllmConfig,
        set_current_vllm_config,
    )
    from vllm.model_executor.model_loader import get_model_loader

    model_config = ModelConfig(model=str(directory), dtype=dtype, enforce_eager=True)
    config = VllmConfig(
        model_config=model_config,
        device_config=DeviceConfig(device="cpu"),
        load_config=LoadConfig(),
        compilation_config=CompilationConfig(custom_ops=list(custom_ops)),
        additional_config=additional_config or {},
    )
    with set_current_vllm_config(config):
        return get_model_loader(config.load_config).load_model(vllm_config=config, model_config=model_config), config


def layers_of(model: Any) -> dict[str, Any]:
    from vllm.model_executor.layers.linear import LinearBase

    return {name: module for name, module in model.named_modules() if isinstance(module, LinearBase)}


def _serve(rank: int, world: int, folder: Path, directories: list[Path]) -> None:
    torch.set_num_threads(1)
    start(rank, world, folder / f"rendezvous-{world}")
    for directory in directories:
        inputs = torch.load(directory / "inputs.pt")
        outputs = {}
        for name, layer in layers_of(load(directory)).items():
            x = inputs[name]
            if layer.tp_size > 1 and layer.input_size_per_partition < layer.input_size:
                x = x.chunk(world, -1)[rank].contiguous()
            outputs[name] = layer(x)[0]
        torch.save(outputs, directory / f"outputs-{world}-{rank}.pt")


def serve(world: int, folder: Path, directories: list[Path]) -> None:
    """Load every directory on ``world`` ranks and write what its linear layers make of the inputs beside it."""
    on_ranks(_serve, (world, folder, directories), world)
