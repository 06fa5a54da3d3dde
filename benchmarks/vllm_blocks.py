"""Blocks of the KV cache that vLLM's engine makes beside each way to store the weights, with nothing configured.

    python benchmarks/vllm_blocks.py results/h200/vllm-blocks.csv --columns dense,fp8,bitmask --compiled dense,bitmask

Engines start one after another, alone on the GPU: vLLM measures what loading and a step of the most tokens leave free.
Kernels are compiled beforehand, for all columns side by side.
"""

from __future__ import annotations

import argparse
import time
from argparse import Namespace
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vllm_checkpoints import COLUMNS, MODELS, RIVALS, config_of, packed_of, shapes_of
from vllm_engine import weight_bytes
from vllm_process import Child, Turn
from vllm_speed import Entry, add, folder_of, inspect_model, run_engines, write_checkpoint

WAIT_S = 150
"""Longest that an engine may take to start, or a checkpoint to be written."""

TOKENS = 16384
"""Per step, the default of ``vllm.LLM`` on a GPU of at least 70 GiB."""

FREED_S, LEFT_BYTES = 15, 2 << 30
"""Longest that an engine waits until the one before it has left the GPU, and what may be in use then."""


@dataclass(frozen=True)
class BlockRow:
    """A row of the CSV.

    Args:
        model: the model whose shapes the layers have.
        weights: how the weights are stored.
        weight_gib: GPU memory that loading the weights took, as vLLM measures it.
        compiled: whether the engine compiled and captured CUDA graphs, for which it keeps memory, too.
        utilization: vLLM's ``gpu_memory_utilization``, its default.
        blocks: of the KV cache.
        block_tokens: tokens per block.
        start_s: seconds until the engine took requests.
        machine: the GPU.
        software: versions.
    """

    model: str
    weights: str
    weight_gib: float
    compiled: bool
    utilization: float
    blocks: int
    block_tokens: int
    start_s: float
    machine: str
    software: str


def write_and_compile(turn: Turn, entry: Entry, args: Namespace) -> None:
    """Write an entry's checkpoint, and compile the kernels of its matmuls into the cache on disk."""
    import torch

    from semisparse.nn import StackedLinear

    write_checkpoint(turn, entry, args)
    if entry.stored in COLUMNS and torch.cuda.is_available():
        packed = packed_of(config_of(entry.model, args.layers), entry.stored, torch.device("cuda"))
        shapes = shapes_of(config_of(entry.model, args.layers))
        for fused in (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",)):
            weights = [packed[shape] for name, shape in shapes.items() if name.endswith(fused)]
            StackedLinear(weights).prepare(TOKENS, torch.bfloat16)
    turn.say("compiled")


def wait_for_memory() -> None:
    """Wait until the engine before this one has left the GPU; this process does not initialise CUDA."""
    from vllm.platforms import current_platform
    from vllm.third_party import pynvml

    if not current_platform.is_cuda():
        return
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(current_platform.device_id_to_physical_device_id(0))
    deadline = time.monotonic() + FREED_S
    while pynvml.nvmlDeviceGetMemoryInfo(handle).used > LEFT_BYTES and time.monotonic() < deadline:
        time.sleep(0.1)
    print(f"{pynvml.nvmlDeviceGetMemoryInfo(handle).used / 2**30:.2f} GiB in use")


def count_blocks(turn: Turn, folder: Path, settings: dict[str, Any], names: dict[str, str]) -> None:
    """Start an engine, and send its row."""
    import torch
    import vllm

    wait_for_memory()
    started = time.perf_counter()
    engine = vllm.LLM(str(folder), skip_tokenizer_init=True, **settings)
    start_s = time.perf_counter() - started
    cache = engine.llm_engine.vllm_config.cache_config
    row = BlockRow(
        **names,
        weight_gib=round(engine.collective_rpc(weight_bytes)[0] / 2**30, 2),
        compiled="enforce_eager" not in settings,
        utilization=cache.gpu_memory_utilization,
        blocks=cache.num_gpu_blocks,
        block_tokens=cache.block_size,
        start_s=round(start_s, 1),
        machine=torch.cuda.get_device_name(),
        software=f"vllm {vllm.__version__}, torch {torch.__version__}",
    )
    turn.say("row", asdict(row))


def run(args: Namespace) -> None:
    """Write all checkpoints, then start each engine and append its row."""
    entries = {word: Entry.parse(word) for word in [*args.columns.split(","), *filter(None, args.compiled.split(","))]}
    scratch = Path(args.scratch)
    others = [
        Child(f"code of {model}", scratch / f"inspect-{model}.log", inspect_model, model)
        for model in MODELS
        if model in {entry.model for entry in entries.values()}
    ]
    writers = [
        Child(f"checkpoint {entry.name}", scratch / f"write-{entry.name}.log", write_and_compile, entry, args)
        for entry in entries.values()
    ]
    for last, children in (("inspected", others), ("compiled", writers)):
        for child in children:
            child.messages(last, WAIT_S)
            child.end(20)
    turns = [(word, True) for word in filter(None, args.compiled.split(","))]
    for word, compiled in [*((word, False) for word in args.columns.split(",")), *turns]:
        entry = entries[word]
        settings: dict[str, Any] = {} if compiled else {"enforce_eager": True}
        if entry.stored in RIVALS:
            settings |= {"load_format": "dummy", **RIVALS[entry.stored]}
        names = {"model": entry.model, "weights": entry.column}
        log = scratch / f"blocks-{entry.name}-{compiled}.log"
        child = Child(entry.name, log, count_blocks, folder_of(entry, args), settings, names)
        found = child.messages("row", WAIT_S)
        if found is not None:
            add(args.out, BlockRow, [found["row"]])
        child.end()


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--columns", default="dense,bitmask,gqs-w4s50,bitmask-w4,slide24-2:4-int8,fp8,int4,vector_nm")
    parser.add_argument("--compiled", default="", help="columns started once more, with compilation and graphs")
    parser.add_argument("--layers", type=int, help="decoder layers, if not all of the model")
    parser.add_argument("--scratch", default="/tmp/vllm-blocks", help="where checkpoints and logs are written")
    args = parser.parse_args()
    run_engines(run, args)


if __name__ == "__main__":
    main()
