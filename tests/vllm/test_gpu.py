"""The real engine on a GPU, CUDA graphs and compilation on, beside transformers: every format on trained models.

Run by ``make test-vllm-gpu``. Engines of several tests share the GPU, so each takes a fixed piece of its memory.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor import config as inductor_config
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GemmaConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from semisparse.demo import MODEL
from semisparse.engine.paged_attention import PagedKernel
from semisparse.errors import KernelError
from semisparse.nn import dense_copy, split_experts
from tests.models import SHARED, byte_tokenizer
from tests.serving import SIZES, Served, one, write, write_compressed
from tests.vllm.greedy_texts import NEW_TOKENS, PROMPTS, TEXTS, by_vllm, compare, prompts_of

pytest.importorskip("vllm", reason="vLLM is not installed")

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def source_of(name: str) -> Path:
    """The directory of a trained model; the test is skipped if it is absent."""
    source = MODEL if name == "demo" else SHARED / "models" / name
    if not source.is_dir():
        pytest.skip(f"../shared/models/{name} is absent")
    return source


FORMATS = {
    served.name: served
    for served in (
        Served("bitmask", "bitmask", one("32:64")),
        Served("bitmask-w4", "bitmask", one("32:64"), {"kind": "w4"}),
        Served("gqs-w4s50", "gqs", one("g16@50%"), {"kind": "w4"}),
        Served("gqs-dense-w4", "gqs", one("g128@0%"), {"kind": "w4"}),
        Served("vector_nm", "vector_nm", one("16:32v32")),
        Served("ec_csr", "ec_csr", one("70%")),
        Served("slide24", "slide24", one("6:8")),
        Served("slide24-int8", "slide24", one("6:8"), {"kind": "int8"}),
        Served("slide24-fp8", "slide24", one("6:8"), {"kind": "fp8"}),
        Served("dense-int8", "dense", one("0%"), {"kind": "int8"}),
    )
}


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines in this process, without the network."""
    for variable in ("VLLM_NO_USAGE_STATS", "HF_HUB_OFFLINE"):
        monkeypatch.setenv(variable, "1")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"))


FUSIONS = {"normed", "added", "gated"}
"""A norm before a matmul; a residual after it; SiLU after it and a norm before."""


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """The packed matmuls of the graphs that the fusion pass ran on: by what is fused, or ``alone``."""
    from vllm import envs

    from semisparse.integrations.vllm import fusion

    # The pass runs only where something is compiled. The first engine of a process caches vLLM's variables.
    envs.disable_envs_cache()
    monkeypatch.setenv("VLLM_DISABLE_COMPILE_CACHE", "1")
    monkeypatch.setattr(inductor_config, "force_disable_caches", True)
    found: Counter[str] = Counter()
    run = fusion.FusionPass.__call__

    def count(self: Any, graph: torch.fx.Graph) -> None:
        run(self, graph)
        for node in graph.nodes:
            if node.target is fusion.FUSED:
                *_, norm, _, _, gated = node.args
                found["gated" if gated else "added" if norm is None else "normed"] += 1
            elif node.target in fusion.LINEARS:
                found["alone"] += 1

    monkeypatch.setattr(fusion.FusionPass, "__call__", count)
    return found


def written(name: str, served: Served, folder: Path, dtype: torch.dtype = torch.float16) -> Path:
    source = source_of(name)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype).eval()
    return write_compressed(model, AutoTokenizer.from_pretrained(source), served, folder / f"{name}-{served.name}")


ARCHITECTURES: dict[str, tuple[PreTrainedConfig, bool]] = {
    "qwen2": (Qwen2Config(**{**SIZES, "architectures": ["Qwen2ForCausalLM"]}), True),
    "qwen3": (Qwen3Config(**{**SIZES, "architectures": ["Qwen3ForCausalLM"]}, head_dim=64), True),
    "gemma": (GemmaConfig(**{**SIZES, "architectures": ["GemmaForCausalLM"]}, head_dim=64), False),
}
"""Models that are not Llamas, and whether norms are fused into their matmuls."""

MIXTURE = Qwen3MoeConfig(
    **{**SIZES, "architectures": ["Qwen3MoeForCausalLM"]},
    head_dim=64,
    moe_intermediate_size=128,
    num_experts=8,
    num_experts_per_tok=2,
)

FEW_GRAPHS = {"cudagraph_capture_sizes": [1, 2, 4]}
"""vLLM's compilation settings: CUDA graphs for the numbers of sequences here only, instead of its 51 sizes."""

# Activations rounded to 8 bits may round to the next code: logits then differ by whole steps, and texts soon differ. Of
# the 320 tokens of the others, 47 to 320 were equal (H200): all texts part at a near tie.
LEAST = {name: PROMPTS if served.rounds else NEW_TOKENS // 2 for name, served in FORMATS.items()}
"""Tokens that must be equal at least."""


@pytest.mark.parametrize("served", FORMATS)
@pytest.mark.parametrize("name", TEXTS)
def test_greedy_text_is_that_of_transformers(name: str, served: str, tmp_path: Path):
    directory = written(name, FORMATS[served], tmp_path)
    compare(directory, name, torch.float16, LEAST[served], max_num_batched_tokens=256, enforce_eager=True)


def test_so_it_is_with_prompts_in_chunks(tmp_path: Path):
    """A step computes at most 24 tokens, so three of the four prompts of 16 tokens are cut or wait."""
    directory = written("stories260k", FORMATS["bitmask"], tmp_path)
    steps = {"max_num_batched_tokens": 24, "max_num_seqs": 4}
    compare(directory, "stories260k", torch.float16, LEAST["bitmask"], enforce_eager=True, **steps)


def test_so_it_is_with_keys_and_values_from_the_prefix_cache(tmp_path: Path):
    """The first prompt, computed again, finds all of its full blocks."""
    directory = written("demo", FORMATS["bitmask"], tmp_path)
    least = LEAST["bitmask"]
    assert compare(directory, "demo", torch.float16, least, 40, compilation_config=FEW_GRAPHS).cached >= 32


@pytest.mark.parametrize("served", FORMATS)
def test_so_it_is_compiled_and_with_graphs(served: str, tmp_path: Path):
    compare(written("demo", FORMATS[served], tmp_path), "demo", torch.float16, LEAST[served])


@pytest.mark.parametrize(
    "served", ["bitmask", "bitmask-w4", "gqs-w4s50", "gqs-dense-w4", "vector_nm", "ec_csr", "dense-int8"]
)
def test_so_it_is_with_fused_matmuls(served: str, tmp_path: Path, fused: Counter[str]):
    directory = written("demo", FORMATS[served], tmp_path)
    compare(directory, "demo", torch.float16, LEAST[served], compilation_config=FEW_GRAPHS)
    if served in ("bitmask", "dense-int8"):  # no kernel of dense in 8 bits computes anything but the matmul
        assert fused.keys() == (FUSIONS if served == "bitmask" else {"alone"})
    else:
        assert fused.keys() & FUSIONS


@pytest.mark.parametrize("served", ["bitmask", "gqs-w4s50"])
def test_so_it_is_without_fused_matmuls(served: str, tmp_path: Path, fused: Counter[str]):
    directory = written("demo", FORMATS[served], tmp_path)
    settings = {"additional_config": {"semisparse_fusion": False}, "compilation_config": FEW_GRAPHS}
    compare(directory, "demo", torch.float16, LEAST[served], **settings)
    assert not fused


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_so_it_is_of_another_architecture(name: str, tmp_path: Path, fused: Counter[str]):
    """Random weights: queries with biases; norms of queries and keys; norms whose weights vLLM makes float32."""
    config, is_fused = ARCHITECTURES[name]
    directory = write(Served(name, "bitmask", one("32:64"), config=config), tmp_path / name, torch.float16)
    compare(directory, "demo", torch.float16, LEAST["bitmask"], compilation_config=FEW_GRAPHS)
    assert fused.keys() == (FUSIONS if is_fused else {"alone"})


@pytest.mark.parametrize("are_packed", [True, False])
def test_so_it_is_of_a_mixture_of_experts(are_packed: bool, tmp_path: Path, fused: Counter[str]):
    """Random weights, their router's large: its choice of the second expert matters only where it is not a near tie."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(MIXTURE, dtype=torch.float16).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("mlp.gate.weight"):
            parameter.data.mul_(50)
    if are_packed:
        split_experts(model)
    served = Served("mixture", "bitmask", one("32:64"), config=MIXTURE)
    directory = write_compressed(model, byte_tokenizer(), served, tmp_path / "mixture")
    compare(directory, "demo", torch.float16, LEAST["bitmask"], compilation_config=FEW_GRAPHS)
    assert fused["normed"]
    assert fused["added"]


def test_so_it_is_with_dense_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dense_copy, "MANY_TOKENS", {0: 4})
    used = set()

    def dense(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        used.add(len(x))
        return F.linear(x, weight, bias)

    monkeypatch.setattr(dense_copy, "F", SimpleNamespace(linear=dense))
    directory = written("demo", FORMATS["bitmask"], tmp_path)
    settings = {"additional_config": {"semisparse_keep_dense": ["*"]}, "compilation_config": FEW_GRAPHS}
    compare(directory, "demo", torch.float16, LEAST["bitmask"], **settings)
    assert 4 in used  # a decode step of all prompts
    assert min(used) == 4


@pytest.mark.parametrize("is_own", [True, False], ids=["own", "flash"])
@pytest.mark.parametrize("served", ["bitmask", "gqs-w4s50", "vector_nm", "dense-int8"])
def test_so_it_is_with_either_attention(served: str, is_own: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The graphs of one and two sequences have the engine's by default; the prompt that is computed again, alone, runs
    through them."""
    from vllm.platforms import current_platform

    capability = current_platform.get_device_capability()
    if is_own and (capability.major, capability.minor) != (9, 0):
        pytest.skip("the engine's attention is chosen on Hopper GPUs")
    attended, run = set(), PagedKernel.__call__

    def attend(kernel: PagedKernel, q: Tensor, key: Tensor, value: Tensor, pages: Any, out: Tensor) -> None:
        attended.add(len(out))
        run(kernel, q, key, value, pages, out)

    monkeypatch.setattr(PagedKernel, "__call__", attend)
    directory = written("demo", FORMATS[served], tmp_path)
    additional = {} if is_own else {"semisparse_attention": False}
    settings = {"additional_config": additional, "compilation_config": FEW_GRAPHS}
    compare(directory, "demo", torch.float16, LEAST[served], **settings)
    assert attended == ({1, 2} if is_own else set())


def test_so_it_is_with_the_engine_s_attention_named_and_the_larger_model(tmp_path: Path):
    directory = written("pycode-11m", FORMATS["bitmask"], tmp_path)
    settings = {"attention_config": {"backend": "CUSTOM"}, "compilation_config": FEW_GRAPHS}
    compare(directory, "pycode-11m", torch.float16, LEAST["bitmask"], **settings)


def test_so_it_is_with_graphs_of_all_steps_and_a_prompt_of_two_tokens(tmp_path: Path):
    """Two tokens of one sequence must not run the graph of two sequences, which has the engine's attention."""
    directory = written("demo", FORMATS["bitmask"], tmp_path)
    graphs = {**FEW_GRAPHS, "cudagraph_mode": "FULL"}
    compare(directory, "demo", torch.float16, LEAST["bitmask"], 2, compilation_config=graphs)


@pytest.mark.parametrize("served", FORMATS)
def test_so_it_is_on_a_larger_model(served: str, tmp_path: Path):
    directory = written("pycode-11m", FORMATS[served], tmp_path)
    compare(directory, "pycode-11m", torch.float16, LEAST[served], compilation_config=FEW_GRAPHS)


def test_so_it_is_in_bfloat16(tmp_path: Path):
    directory = written("demo", FORMATS["bitmask"], tmp_path, torch.bfloat16)
    compare(directory, "demo", torch.bfloat16, PROMPTS)


def test_another_dtype_than_the_kernels_take_is_refused(tmp_path: Path):
    directory = written("demo", FORMATS["bitmask"], tmp_path)
    with pytest.raises(KernelError, match=r"no kernel for bfloat16 and 1 tokens here .* use another dtype or format"):
        by_vllm(directory, prompts_of(directory, "demo"), torch.bfloat16)
