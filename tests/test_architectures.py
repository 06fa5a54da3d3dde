"""Every architecture that people use: compressed in two formats, written, loaded and run; or refused.

docs/architectures.md is the table of the outcomes.
"""

import json
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import semisparse
from semisparse.api import inspect_directory
from semisparse.errors import InputError
from semisparse.integrations.transformers import sparse_layers
from tests.architectures import CONFIGS, tiny_model
from tests.models import byte_tokenizer

DOCUMENTS = [f"document {i}: " + "some words to read " * (i % 5) for i in range(20)]
IDS = torch.arange(3, 2 * 12 + 3).view(2, 12)

RECIPES = {
    "bitmask": ("rheosparse", ("pattern=2:4", "prune=magnitude", "search=none", "format=bitmask"), {}),
    "gqs": ("gqsa", ("tune=none",), {"calibration": DOCUMENTS, "samples": 4, "seqlen": 24}),
}

REFUSED = {
    "BERT": "BertLMHeadModel is not supported; semisparse takes decoder-only transformers",
    "T5": "T5ForConditionalGeneration is not supported; semisparse takes decoder-only transformers",
    "Mamba": "MambaForCausalLM is a model without attention, such as a state-space model; semisparse",
}

LAYERS = {
    "Llama-4 text": (30, "lm_head model.layers.?.feed_forward.router"),
    "Llama-4": (
        30,
        "language_model.lm_head vision_model.* multi_modal_projector* language_model.*.feed_forward.router",
    ),
    "Qwen3-MoE": (24, "lm_head model.layers.?.mlp.gate"),
    "Qwen3-Next": (29, "lm_head model.layers.?.mlp.gate model.layers.?.mlp.shared_expert_gate"),
    "Mixtral": (24, "lm_head model.layers.?.mlp.gate"),
    "GPT-OSS": (24, "lm_head model.layers.?.mlp.router"),
    "DeepSeek-V3": (32, "lm_head model.layers.1.mlp.gate"),
    "Gemma-3": (14, "lm_head model.vision_tower.*"),
    "Phi-3": (8, "lm_head"),
    "Phi-3.5-MoE": (24, "lm_head model.layers.?.mlp.router"),
    "OPT": (12, "lm_head"),
    "Apertus": (12, "lm_head"),
    "GPT-2": (8, "lm_head"),
    "GPT-NeoX": (8, "lm_head"),
    "Falcon": (8, "lm_head"),
    "BLOOM": (8, "lm_head"),
    "OLMoE": (24, "lm_head model.layers.?.mlp.gate"),
    "Granite-MoE": (24, "lm_head model.layers.?.block_sparse_moe.router"),
    "StarCoder-2": (12, "lm_head"),
    "Qwen2-VL": (14, "lm_head model.visual.*"),
    "Qwen3-VL": (14, "lm_head model.visual.*"),
    "LFM2": (12, "lm_head"),
    "Bamba": (12, "lm_head"),
    "ModernBERT decoder": (12, "lm_head.dense decoder"),
    "MiniMax": (23, "lm_head model.layers.?.*.gate"),
    "LLaVA": (14, "lm_head model.vision_tower.* model.multi_modal_projector.*"),
}
"""How many layers are compressed, and which weights stay dense; of others 14 and the head."""

QUICK = (("Mixtral", "gqs"), ("Gemma-3", "bitmask"))
"""Architectures and formats of `make test`: experts, and a text decoder inside another model, under names that are not
those on disk."""


def cases() -> list[object]:
    names = [name for name in CONFIGS if name not in REFUSED]
    return [
        pytest.param(name, form, id=f"{name}-{form}", marks=[] if (name, form) in QUICK else [pytest.mark.slow])
        for name in names
        for form in RECIPES
    ]


def write(architecture: str, directory: Path) -> Path:
    tiny_model(architecture).save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    return directory


@pytest.mark.parametrize(("architecture", "form"), cases())
@torch.no_grad()
def test_compressed_written_loaded_and_run(architecture: str, form: str, tmp_path: Path) -> None:
    source, out = write(architecture, tmp_path / "in"), tmp_path / "out"
    recipe, settings, calibration = RECIPES[form]
    report = semisparse.compress(source, recipe=recipe, settings=settings, out=out, **calibration)
    count, dense = LAYERS.get(architecture, (14, "lm_head"))
    assert len(report.layers) == count
    assert {layer["format"] for layer in report.layers} == {form}
    stays = [layer["name"] for layer in report.dense]
    assert all(any(fnmatchcase(name, glob) for glob in dense.split()) for name in stays), stays
    assert all(any(fnmatchcase(name, glob) for name in stays) for glob in dense.split()), stays
    assert inspect_directory(out, verify=True)["verified"]

    model = semisparse.load(out, "cpu")
    assert len(sparse_layers(model)) == count
    found = model(IDS, use_cache=False).logits
    new = model.generate(IDS, max_new_tokens=3, min_new_tokens=3, do_sample=False, pad_token_id=0)
    assert new.shape == (2, 15)
    written_again(model, out, tmp_path / "again")
    model.dequantize()
    assert not sparse_layers(model)
    expected = model(IDS, use_cache=False).logits
    assert expected.isfinite().all()
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))
    original = semisparse.load(source, "cpu")
    assert not torch.allclose(original(IDS, use_cache=False).logits, expected, rtol=1e-2, atol=1e-2)
    assert_same_outside(original, model, report.layers)


def written_again(model: torch.nn.Module, out: Path, again: Path) -> None:
    model.save_pretrained(again)
    first, second = (load_file(folder / "model.safetensors") for folder in (out, again))
    assert first.keys() == second.keys()
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    blocks = [json.loads((folder / "config.json").read_text())["quantization_config"] for folder in (out, again)]
    assert blocks[0]["layers"] == blocks[1]["layers"]


def assert_same_outside(original: torch.nn.Module, unpacked: torch.nn.Module, layers: list[dict[str, object]]) -> None:
    """Check that exactly the weights that the report lists have changed, and no bias, norm, router or embedding."""
    state, kept = original.state_dict(), unpacked.state_dict()
    assert state.keys() == kept.keys()
    changed = [name for name, tensor in state.items() if not torch.equal(tensor, kept[name])]
    fused = sum(len(state[name]) for name in changed if state[name].dim() == 3)
    assert fused + sum(state[name].dim() == 2 for name in changed) == len(layers)
    assert not any(state[name].dim() == 1 for name in changed)


@pytest.mark.parametrize(("architecture", "reason"), REFUSED.items())
def test_refused_in_a_sentence_before_anything_is_written(architecture: str, reason: str, tmp_path: Path) -> None:
    source = write(architecture, tmp_path / "in")
    with pytest.raises(InputError, match=reason) as refusal:
        semisparse.compress(source, settings=RECIPES["bitmask"][1], out=tmp_path / "out")
    assert len(str(refusal.value)) < 200
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
