"""End to end on a GPU: every recipe compresses a model there, twice with the same result, and the result runs there."""

import copy
from pathlib import Path

import pytest
import torch

import semisparse
from semisparse.api import recipes
from tests.models import byte_tokenizer, random_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="compresses on a GPU: no GPU here")

DOCUMENTS = [f"document {i}: " + "some words to read " * (i % 5) for i in range(40)]
SEARCH = ("search_effort=24", "search_tokens=256")
MORE = {
    "evolution": ("rheosparse", ("search=evolution", *SEARCH)),
    "the paper's search": ("rheosparse", ("search=rheosparse", *SEARCH)),
    "2:4, tuned": ("rheosparse", ("pattern=2:4", "search=none", "tune=bqpo", "tune_epochs=1")),
    "pruned and rounded at once": ("gqsa", ("refine=none", "tune=none")),
    "rounded to nearest": ("gqsa", ("pattern=g16@0%", "quant=w2", "prune=magnitude", "tune=none")),
}
DEFAULT = {"rheosparse": SEARCH, "gqsa": ("tune_epochs=1",), "auto": ("tune_epochs=1", "search_effort=1")}
WAYS = {name: (name, DEFAULT.get(name, ())) for name in recipes() if name != "keep"} | MORE
"""All recipes but ``keep``, which stores models that another tool quantised, and computes nothing on a GPU."""


@pytest.mark.parametrize("way", WAYS)
def test_compress_twice_and_run(way: str, tmp_path: Path):
    recipe, settings = WAYS[way]
    model = random_model("llama")
    for out in ("once", "again"):
        semisparse.compress(
            copy.deepcopy(model),
            byte_tokenizer(),
            recipe,
            DOCUMENTS,
            tmp_path / out,
            settings=settings,
            target={"bits": 9.0} if recipe == "auto" else None,
            samples=8,
            seqlen=32,
            device="cuda",
        )
    weights = "model.safetensors"
    assert (tmp_path / "once" / weights).read_bytes() == (tmp_path / "again" / weights).read_bytes()
    ids = torch.arange(2 * 20).view(2, 20)
    exact = semisparse.load(tmp_path / "once", "cpu", torch.float32)(ids).logits
    # bfloat16 rounds each of some 20 steps to 2^-9; 8-bit activations make a rounding of x a step of theirs, 2^-7.
    # With float32 x a CPU multiplies dequantised weights as they are; a GPU rounds them to bfloat16, as the scales are.
    single = {"slidesparse": 0.05, "gqsa": 2**-8}.get(recipe, 1e-3)
    for dtype, bound in ((torch.float32, single), (torch.bfloat16, 0.1)):
        found = semisparse.load(tmp_path / "once", "cuda", dtype)(ids.cuda()).logits.float().cpu()
        assert (found - exact).norm() <= bound * exact.norm(), dtype
