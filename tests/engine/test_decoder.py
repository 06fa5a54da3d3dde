"""The decode step: its kernels, emulated, and that they compute what the model's own code does."""

import copy
from collections import Counter

import pytest
import torch
from transformers import PreTrainedModel

from semisparse.api import compress
from semisparse.engine.decoder import Cache, Decoder
from semisparse.formats import get_format, product
from semisparse.formats.kernel import Kernel
from semisparse.nn import SparseLinear, join_layers
from tests.cuda_emulator import EmulatedKernel, emulate, needs_compiler
from tests.models import byte_tokenizer, random_model

WIDTHS = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch):
    """Emulate the GPU kernels of every product; return the names of those that are launched."""
    names: list[str] = []

    def refusal(kernel: Kernel, problem):
        return kernel.supports(problem) if kernel.device == "cuda" else "runs on a CPU"

    class Recorded(EmulatedKernel):
        def __init__(self, build) -> None:
            super().__init__(build)
            self.name = build.name.removeprefix("semisparse_")

        def __call__(self, *arguments, **named) -> None:
            names.append(self.name)
            super().__call__(*arguments, **named)

    caches = product._fused, product._prepared
    for cache in caches:
        cache.cache_clear()
    emulate(monkeypatch, sms=2)
    monkeypatch.setattr(Kernel, "refusal", refusal)
    monkeypatch.setattr("semisparse.runtime.kernel.KernelBuild.load", lambda build, device: Recorded(build))
    yield names
    for cache in caches:
        cache.cache_clear()


def in_gpu_layout(model: PreTrainedModel, form: str) -> None:
    for module in model.modules():
        if isinstance(module, SparseLinear):
            module._set_packed(get_format(form).arrange(module.packed, "cuda"))


@needs_compiler
@pytest.mark.parametrize(
    ("form", "recipe", "architecture", "kernel", "apart"),
    [
        ("dense", "", "qwen3", "dense_decode", []),
        pytest.param("gqs", "gqsa", "llama", "gqs_decode", [], marks=pytest.mark.slow),
        pytest.param("vector_nm", "nm-spmm", "qwen3", "vector_nm_decode_tensor", [], marks=pytest.mark.slow),
        pytest.param("ec_csr", "ec-spmv", "llama", "ec_csr_decode", [], marks=pytest.mark.slow),
        # Panels of consecutive rows: the gate is a kernel of its own.
        pytest.param("ec_csr", "ec-spmv", "qwen3", "ec_csr_decode", ["silu_mul"], marks=pytest.mark.slow),
    ],
)
@torch.no_grad()
def test_a_layer_takes_five_kernels(launched: list[str], form, recipe, architecture, kernel, apart):
    model = random_model(architecture, torch.bfloat16, **WIDTHS)
    if recipe:
        compress(model, byte_tokenizer(), recipe=recipe, settings=["prune=magnitude", "tune=none"], device="cpu")
    tokens = torch.arange(7)[None] * 5 + 1
    expected = copy.deepcopy(model)(input_ids=tokens).logits[0, -1].float()
    join_layers(model)
    if not apart:
        in_gpu_layout(model, form)
    decoder = Decoder(model, 16)
    cache = Cache.make(decoder, 1, 16)
    decoder.prompt(tokens[:, :6].tolist(), cache)
    launched.clear()
    found = decoder.step(tokens[:, 6:], torch.tensor([6], dtype=torch.int32), cache)[0].float()
    layers = len(decoder.layers)
    matmuls = Counter({kernel: 4 * layers}) + Counter({"dense_decode": 1})
    assert Counter(launched) == matmuls + Counter({"engine_attention": layers} | dict.fromkeys(apart, layers))
    assert torch.cosine_similarity(found, expected, dim=0) > 0.999
