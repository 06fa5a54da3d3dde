"""The decode step: its kernels, emulated, and that they compute what the model's own code does."""

import copy
from collections import Counter

import pytest
import torch

from semisparse.api import compress
from semisparse.engine.decoder import Cache, Decoder
from semisparse.formats import product
from semisparse.formats.kernel import Kernel
from semisparse.nn import join_layers
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
    emulate(monkeypatch)
    monkeypatch.setattr(Kernel, "refusal", refusal)
    monkeypatch.setattr("semisparse.runtime.kernel.KernelBuild.load", lambda build, device: Recorded(build))
    yield names
    for cache in caches:
        cache.cache_clear()


@needs_compiler
@pytest.mark.parametrize(
    ("recipe", "architecture", "kernel"),
    [
        ("", "qwen3", "dense_decode"),
        pytest.param("gqsa", "llama", "gqs_decode", marks=pytest.mark.slow),
        pytest.param("nm-spmm", "qwen3", "vector_nm_decode_tensor", marks=pytest.mark.slow),
    ],
)
@torch.no_grad()
def test_a_layer_takes_five_kernels(launched: list[str], recipe: str, architecture: str, kernel: str):
    model = random_model(architecture, torch.bfloat16, **WIDTHS)
    if recipe:
        compress(model, byte_tokenizer(), recipe=recipe, settings=["prune=magnitude", "tune=none"], device="cpu")
    tokens = torch.arange(7)[None] * 5 + 1
    expected = copy.deepcopy(model)(input_ids=tokens).logits[0, -1].float()
    join_layers(model)
    decoder = Decoder(model, 16)
    cache = Cache.make(decoder, 1, 16)
    decoder.prompt(tokens[:, :6].tolist(), cache)
    launched.clear()
    found = decoder.step(tokens[:, 6:], torch.tensor([6], dtype=torch.int32), cache)[0].float()
    layers = len(decoder.layers)
    matmuls = Counter({kernel: 4 * layers}) + Counter({"dense_decode": 1})
    assert Counter(launched) == matmuls + Counter({"engine_attention": layers})
    assert torch.cosine_similarity(found, expected, dim=0) > 0.999
