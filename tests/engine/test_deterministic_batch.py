"""With deterministic_batch a prompt's logits are the same bits alone and in any batch."""

import pytest
import torch
from torch import Tensor

from semisparse.api import compress
from semisparse.checkpoint import load_dense, load_tokenizer
from semisparse.engine import Engine
from semisparse.errors import InputError
from tests.models import SHARED, byte_tokenizer, random_model

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
RECIPES = {"dense": None, "bitmask": ("rheosparse", "search=none"), "gqs": ("gqsa", "tune=none")}
PROMPT = "def main(args):\n    return"
OTHERS = ["import os", "x", "class Node:\n    def __init__(self, value, parent=None):", "for i in range(10):\n    "]
STEPS = 3


def logits_of(engine: Engine, prompts: list[str], row: int) -> list[Tensor]:
    """Return one row's logits after its prompt and after each of some greedy steps."""
    tokens = [engine.tokenizer(prompt).input_ids for prompt in prompts]
    state, logits = engine.backend.begin(tokens, max(map(len, tokens)) + STEPS)
    found = [logits[row].clone()]
    for _ in range(STEPS):
        state.tokens.copy_(logits.argmax(-1))
        state.positions += 1
        logits = engine.backend.decoder.step(state.tokens[:, None], state.positions, state.cache)
        found.append(logits[row].clone())
    return found


@pytest.mark.skipif(not SHARED.is_dir(), reason="real models are in ../shared: it is absent")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("form", ["dense", "bitmask", pytest.param("gqs", marks=pytest.mark.slow)])
@torch.no_grad()
def test_logits_are_the_same_bits_in_any_batch(form: str, device: str):
    folder = SHARED / "models" / "pycode-11m"
    model, tokenizer = load_dense(folder), load_tokenizer(folder)
    model.to(torch.bfloat16 if device == "cuda" else torch.float32)
    if RECIPES[form] is not None:
        recipe, *settings = RECIPES[form]
        compress(model, tokenizer, recipe=recipe, settings=["prune=magnitude", *settings], device="cpu")
    engine = Engine(model.to(device), tokenizer, deterministic_batch=True)
    alone = logits_of(engine, [PROMPT], 0)
    for batch, row in (([PROMPT, OTHERS[0]], 0), ([*OTHERS, PROMPT], 4), ([*OTHERS * 5, PROMPT], 20)):
        for step, (a, b) in enumerate(zip(alone, logits_of(engine, batch, row), strict=True)):
            assert torch.equal(a, b), f"step {step} of {len(batch)} prompts: off by {(a - b).abs().max():.2g}"
    texts = [one.text for one in engine.generate([*OTHERS, PROMPT], 8)]
    assert texts == [engine.generate([prompt], 8)[0].text for prompt in [*OTHERS, PROMPT]]


def test_a_structure_that_the_engine_does_not_know_is_refused():
    with pytest.raises(InputError, match="deterministic_batch needs the engine's own code"):
        Engine(random_model("gpt2", torch.float32), byte_tokenizer(), deterministic_batch=True)
