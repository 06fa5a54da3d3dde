"""One KV cache for many engines of vLLM on one GPU that compute by turns.

The blocks of all engines are the same memory, so twelve engines fit beside a large cache. Only one may compute at a
time: it overwrites the others' keys and values.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm_process import Child, Turn


def hold(turn: Turn, gib: int) -> None:
    """Allocate the memory, send what opens it, and keep it until the parent ends."""
    from torch.multiprocessing.reductions import reduce_tensor

    memory = torch.zeros(gib << 30, dtype=torch.int8, device="cuda")
    turn.say("held", reduce_tensor(memory))
    turn.wait()


def shared_cache(gib: int, log: Path) -> Any:
    """Start the process that holds the memory, and return what opens it: CUDA's inter-process handle."""
    found = Child("cache", log, hold, gib).messages("held", 60)
    if found is None:
        raise SystemExit(f"no memory could be shared: see {log}")
    return found["held"]


def use_shared_cache(handle: Any) -> None:
    """Let engines that are started from this process take their KV cache from the shared memory."""
    from vllm.v1.worker.gpu import attn_utils
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    def allocate(config: Any) -> dict[str, Tensor]:
        rebuild, arguments = handle
        memory, start, tensors = rebuild(*arguments), 0, {}
        for each in config.kv_cache_tensors:
            part = memory[start : start + each.size]
            if each.block_stride > 0 or len(part) < each.size:
                raise SystemExit("this model's KV cache cannot be taken from the shared memory")
            tensors.update(dict.fromkeys(each.shared_by, part))
            start += each.size
        return tensors

    attn_utils._allocate_kv_cache = lambda config, shared_layers, device: allocate(config)
    GPUModelRunner._allocate_kv_cache_tensors = lambda self, config: allocate(config)
