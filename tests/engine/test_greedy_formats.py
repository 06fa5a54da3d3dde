"""200 greedy tokens of real models in every format are those of transformers: alone, padded, and with proposals."""

import warnings

import pytest
import torch

from semisparse.api import compress
from semisparse.checkpoint import load_dense, load_tokenizer
from semisparse.engine import Engine
from tests.models import SHARED

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not SHARED.is_dir(), reason="real models are in ../shared: it is absent"),
]

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
NEW = 200
PROMPTS = {
    "babyllama-1m": ["Once upon a time", "The dog", "Lily and Tom went to the park. They", "A", "One day, a big"],
    "pycode-11m": [
        "def main(args):\n",
        "import os",
        "class Node:\n    def __init__(self",
        "x",
        "for i in range(10):\n    ",
    ],
    "stories260k": ["Once upon a time there was", "The", "Tom saw a cat. He", "A bird", "Mom said"],
}
FORMATS = {
    "dense": None,
    "bitmask": ("rheosparse", "search=none", "pattern=48:64"),
    "slide24": ("slidesparse", "pattern=6:8", "quant=none"),  # 8-bit x would turn last bits into whole steps
    "vector_nm": ("nm-spmm", "pattern=24:32v8"),
    "ec_csr": ("ec-spmv", "pattern=30%"),
    "gqs": ("gqsa", "tune=none", "pattern=g16@10%", "quant=w8"),
}


ON_A_CPU = {("babyllama-1m", "bitmask"), ("babyllama-1m", "gqs"), ("stories260k", "vector_nm")}
ON_A_CPU |= {("pycode-11m", "slide24"), ("pycode-11m", "ec_csr"), *((name, "dense") for name in PROMPTS)}
"""Each format in one model, and each model dense: ten more seconds of a core for each other pair, which `make test-gpu`
runs."""


@pytest.mark.parametrize(
    ("name", "form", "device"),
    [
        (name, form, device)
        for name in PROMPTS
        for form in FORMATS
        for device in DEVICES
        if device == "cuda" or (name, form) in ON_A_CPU
    ],
)
def test_greedy_text(name: str, form: str, device: str):
    model, tokenizer = load_dense(SHARED / "models" / name).float(), load_tokenizer(SHARED / "models" / name)
    if FORMATS[form] is not None:
        recipe, *settings = FORMATS[form]
        compress(model, tokenizer, recipe=recipe, settings=["prune=magnitude", *settings], device="cpu")
    model.to(device)
    new = min(NEW, model.config.max_position_embeddings - 40)
    expected = []
    for prompt in PROMPTS[name]:
        ids = tokenizer(prompt, return_tensors="pt").input_ids.to(device)
        ends = model.generate(ids, max_new_tokens=new, do_sample=False, pad_token_id=0)
        expected.append(tokenizer.decode(ends[0], skip_special_tokens=True))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine = Engine(model, tokenizer)
    assert [one.text for one in engine.generate(PROMPTS[name], new)] == expected
    assert [one.text for one in engine.generate(PROMPTS[name], new, proposals=4)] == expected
    assert engine.generate(PROMPTS[name][:1], new)[0].text == expected[0]
    assert engine.generate(PROMPTS[name][:1], new, proposals=6)[0].text == expected[0]
