"""A second start builds the decoder without transformers, from what the first start recorded."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from semisparse.api import compress
from semisparse.engine import Engine
from semisparse.engine.bare import BareDecoder
from semisparse.engine.blueprint import Blueprint, recorded
from semisparse.engine.prompt_tokens import end_tokens
from semisparse.errors import CheckpointError
from semisparse.runtime.cache import cache_directory
from tests.conftest import Run
from tests.engine.test_engine import HEADS, PROMPTS
from tests.models import byte_tokenizer, random_model

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
RECIPES = {
    "dense": None,
    "bitmask": ("rheosparse", "search=none", "pattern=32:64"),
    "gqs": ("gqsa", "tune=none", "pattern=g16@50%"),
    "ec_csr": ("ec-spmv", "pattern=70%"),
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    compiled = cache_directory() / "cpp"
    compiled.mkdir(parents=True, exist_ok=True)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "cpp").symlink_to(compiled)  # compiling takes seconds
    monkeypatch.setenv("SEMISPARSE_CACHE", str(tmp_path / "cache"))


def saved(folder: Path, architecture: str = "llama", form: str = "dense", **settings: int) -> Path:
    """Return a directory with a random model and a tokenizer."""
    model = random_model(architecture, torch.bfloat16, **HEADS, **settings)
    if RECIPES[form] is not None:
        recipe, *options = RECIPES[form]
        compress(model, byte_tokenizer(), recipe=recipe, settings=["prune=magnitude", *options], device="cpu")
    model.save_pretrained(folder / "model")
    byte_tokenizer().save_pretrained(folder / "model")
    return folder / "model"


def logits_of(engine: Engine) -> torch.Tensor:
    tokens = [engine.tokenizer(prompt).input_ids for prompt in PROMPTS]
    return engine.backend.begin(tokens, 40)[1].clone()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("architecture", "form"),
    [pytest.param("llama", form, marks=pytest.mark.slow) for form in RECIPES]
    + [("qwen2", "dense"), ("qwen3", "gqs"), ("llama-bias", "bitmask"), ("llama-tied", "ec_csr")],
)
def test_the_second_start_computes_the_same_bits(architecture: str, form: str, device: str, tmp_path: Path):
    path = saved(tmp_path, architecture, form)
    first, second = (Engine(path, device=device, bare=True) for _ in range(2))
    assert not isinstance(first.model, BareDecoder)
    assert isinstance(second.model, BareDecoder)
    assert torch.equal(logits_of(first), logits_of(second))
    texts = [[one.text for one in engine.generate(PROMPTS, 20)] for engine in (first, second)]
    assert texts[0] == texts[1]
    assert end_tokens(first.model) == end_tokens(second.model)
    assert not isinstance(Engine(path, device=device).model, BareDecoder), "unless asked, the model is transformers'"


def test_the_second_command_imports_no_transformers(run: Run, tmp_path: Path):
    words = ("generate", saved(tmp_path), "--prompt", "abc", "--max-new-tokens", "8", "--device", "cpu", "--json")
    command = (
        f"import sys; from semisparse.cli import app; app({[*map(str, words)]!r}, standalone_mode=False); "
        "print({'torch._dynamo', 'transformers', 'sympy'} & set(sys.modules))"
    )
    first = run(*words).json  # which records the model, without which the next one needs transformers
    ended = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, timeout=120, check=True)
    second, imported = ended.stdout.splitlines()
    assert json.loads(second)["text"] == first["text"]
    assert imported == "set()"


def test_another_config_is_compared_again(tmp_path: Path):
    path = saved(tmp_path)
    Engine(path, device="cpu", bare=True)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.1}))
    engine = Engine(path, device="cpu", bare=True)
    assert not isinstance(engine.model, BareDecoder)
    assert engine.backend.decoder.structure.epsilon == 0.1


def test_files_with_other_tensors_go_through_transformers(tmp_path: Path):
    path = saved(tmp_path)
    Engine(path, device="cpu", bare=True)
    tensors = load_file(path / "model.safetensors")
    save_file(tensors | {"model.extra": torch.zeros(1)}, path / "model.safetensors", {"format": "pt"})
    assert not isinstance(Engine(path, device="cpu", bare=True).model, BareDecoder)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj\.weight is missing"):
        Engine(path, device="cpu", bare=True)


@pytest.mark.parametrize("device", DEVICES)
def test_damaged_weights_are_refused(device: str, tmp_path: Path):
    path = saved(tmp_path, form="bitmask")
    Engine(path, device=device, bare=True)
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.1.mlp.up_proj"
    masks = next(key for key in tensors if key.startswith(name) and not tensors[key].is_floating_point())
    whole = dict(tensors)
    tensors[masks] = torch.full_like(tensors[masks], -1)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"layer {name}: "):
        Engine(path, device=device, bare=True)
    whole["model.norm.weight"] = torch.full_like(whole["model.norm.weight"], torch.nan)
    save_file(whole, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match="logits are NaN"):
        Engine(path, device=device, bare=True)


def test_a_rotary_embedding_that_depends_on_the_length_is_not_recorded(tmp_path: Path):
    path = saved(tmp_path)
    config = json.loads((path / "config.json").read_text())
    scaling = {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
        "original_max_position_embeddings": 32,
    }
    (path / "config.json").write_text(json.dumps(config | {"rope_parameters": scaling}))
    engines = [Engine(path, device="cpu", bare=True) for _ in range(2)]
    assert not any(isinstance(engine.model, BareDecoder) for engine in engines)


def test_a_model_of_another_structure_is_not_recorded(tmp_path: Path):
    path = saved(tmp_path, "gpt2")
    with pytest.warns(UserWarning, match="transformers' own code"):
        Engine(path, device="cpu", bare=True)
    assert recorded(path, torch.device("cpu"), None) is None


def test_a_blueprint_is_read_back_exactly(tmp_path: Path):
    path = saved(tmp_path, "qwen3")
    Engine(path, device="cpu", bare=True)
    found = recorded(path, torch.device("cpu"), None)
    assert found is not None
    assert Blueprint.from_json(found.to_json()) == found
    assert recorded(path, torch.device("cpu"), torch.bfloat16) is None, "another dtype is compared again"
