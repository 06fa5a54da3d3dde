"""Hostile directories: none of their code runs, no index is followed out of them, and shapes must be the model's."""

import json
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import semisparse
from semisparse.api import inspect_directory, load, load_tokenizer
from semisparse.checkpoint import load_dense
from semisparse.compress import Recipe
from semisparse.engine.recorded import load_recorded
from semisparse.errors import CheckpointError
from semisparse.formats import Packed
from semisparse.formats.base import get_format
from semisparse.integrations.transformers import SemisparseQuantizer
from semisparse.patterns import parse_pattern
from tests.models import byte_tokenizer, random_model


@pytest.fixture(scope="module")
def compressed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("untrusted") / "small"
    recipe = Recipe(format="dense", prune="magnitude", pattern="2:4")
    semisparse.compress(random_model("llama"), byte_tokenizer(), recipe, out=out)
    block = json.loads((out / "config.json").read_text())["quantization_config"]
    change_config(out, quantization_config={key: value for key, value in block.items() if key != "digests"})
    return out


@pytest.fixture
def directory(compressed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(compressed, tmp_path / "model"))


def change_config(directory: Path, **changes) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


MARK = "from pathlib import Path\nPath(__file__).with_name('ran').write_text('ran')\n"


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_code_of_the_directory_is_not_run(directory: Path, file: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("builtins.input", lambda *prompt: "yes")
    (directory / "own.py").write_text(MARK + "class Own: pass\n")
    content = json.loads((directory / file).read_text())
    names = ("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer")
    content |= {"auto_map": dict.fromkeys(names, "own.Own"), "model_type": "own", "tokenizer_class": "Own"}
    (directory / file).write_text(json.dumps(content))
    with pytest.raises(CheckpointError):
        load(directory) if file == "config.json" else load_tokenizer(directory)
    assert not list(directory.parent.rglob("ran"))


def test_attention_from_elsewhere_is_refused(directory: Path):
    change_config(directory, attn_implementation="someone/kernels")
    with pytest.raises(CheckpointError, match="code from elsewhere"):
        load(directory)


@pytest.mark.parametrize("name", ["generation_config.json", "chat_template.jinja", "tokenizer.json"])
def test_a_device_in_the_place_of_a_file_is_refused(directory: Path, name: str):
    """Reading /dev/zero does not end."""
    (directory / name).unlink(missing_ok=True)
    (directory / name).symlink_to("/dev/zero")
    for use in (load, load_tokenizer, inspect_directory, partial(load_recorded, device="cpu", dtype=None)):
        with pytest.raises(CheckpointError, match="is no regular file"):
            use(directory)


def test_a_tokenizer_outside_of_the_directory_is_refused(directory: Path):
    """transformers before 5.23 reads it; a name of a file that is not there is of another machine."""
    file = directory / "tokenizer_config.json"
    config = json.loads(file.read_text())
    shutil.copy(directory / "tokenizer.json", directory.parent / "other.json")
    for name in ("../other.json", str(directory.parent / "other.json")):
        file.write_text(json.dumps(config | {"tokenizer_file": name}))
        with pytest.raises(CheckpointError, match="expected a file of the directory itself"):
            load_tokenizer(directory)
    file.write_text(json.dumps(config | {"tokenizer_file": "/nowhere/tokenizer.json", "vocab_file": "tokenizer.json"}))
    load_tokenizer(directory)
    (directory / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match="has no tokenizer: copy tokenizer"):
        load_tokenizer(directory)


def test_an_adapter_that_names_another_model_is_refused(directory: Path):
    """transformers would load that model where PEFT is installed, from any directory or from the Hub."""
    (directory / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "../elsewhere"}))
    for use in (load, inspect_directory, load_dense):
        with pytest.raises(CheckpointError, match=r"holds adapter_config\.json"):
            use(directory)


def test_an_index_that_leads_elsewhere_is_refused_by_from_pretrained_too(directory: Path):
    elsewhere = directory.parent / "elsewhere"
    elsewhere.mkdir()
    weights = directory / "model.safetensors"
    names = list(load_file(weights))
    shutil.copy(weights, elsewhere / "model.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, "../elsewhere/model.safetensors")}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="the directory itself"):
        load(directory)
    weights.unlink()
    with pytest.raises(CheckpointError, match="several directories"):
        AutoModelForCausalLM.from_pretrained(directory)


@pytest.mark.parametrize(
    ("form", "pattern", "options"),
    [("bitmask", "32:64", {}), ("bitmask", "16:32", {"kind": "w4"}), ("ec_csr", "70%", {})],
)
def test_a_layout_for_gpus_is_refused(directory: Path, form: str, pattern: str, options: dict):
    """Its tensors have other names than those of the layer, which transformers would fill with random numbers."""
    weight = torch.randn(64, 64, dtype=torch.bfloat16)
    packed = semisparse.pack(weight * parse_pattern(pattern).mask(weight.abs()), form, pattern, **options)
    arranged = get_format(form).arrange(packed, "cuda")
    assert arranged.params != packed.params
    name = "model.layers.0.mlp.up_proj"
    weights = load_file(directory / "model.safetensors")
    weights = {key: tensor for key, tensor in weights.items() if not key.startswith(name)}
    weights |= {f"{name}.{tensor}": values.contiguous() for tensor, values in arranged.tensors.items()}
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    block = json.loads((directory / "config.json").read_text())["quantization_config"]
    block["layers"][name] = arranged.spec.to_dict()
    change_config(directory, quantization_config=block)
    for use in (load, AutoModelForCausalLM.from_pretrained, inspect_directory):
        with pytest.raises(CheckpointError, match=rf"layer {name}: its params .* declare a layout for GPUs"):
            use(directory)


@pytest.mark.parametrize(("key", "factor"), [("hidden_size", 2), ("intermediate_size", 2), ("num_hidden_layers", 0.5)])
def test_verify_compares_with_the_model_of_config_json(directory: Path, key: str, factor: float):
    assert inspect_directory(directory, verify=True)["verified"]
    config = json.loads((directory / "config.json").read_text())
    change_config(directory, **{key: int(config[key] * factor)})
    with pytest.raises(CheckpointError, match=r"the model of config\.json has"):
        inspect_directory(directory, verify=True)


VERIFY = """
import sys
from semisparse.api import inspect_directory
assert inspect_directory(sys.argv[1], verify=True)["verified"]
print("transformers" in sys.modules)
"""


def test_verify_imports_no_transformers_for_a_model_that_it_knows(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Shapes are recorded by config.json: a changed one is compared with the model that transformers builds."""
    monkeypatch.setenv("SEMISPARSE_CACHE", str(tmp_path / "cache"))

    changed = Path(shutil.copytree(directory, tmp_path / "changed"))
    change_config(changed, hidden_size=json.loads((directory / "config.json").read_text())["hidden_size"] * 2)
    assert inspect_directory(directory, verify=True)["verified"]  # which records the shapes
    words = [sys.executable, "-c", VERIFY, str(directory)]
    assert subprocess.run(words, capture_output=True, text=True, check=True).stdout == "False\n"
    weights = load_file(directory / "model.safetensors")
    norm = next(key for key in weights if "norm" in key)
    save_file(weights | {norm: weights[norm][:-1].clone()}, directory / "model.safetensors", {"format": "pt"})
    for other in (directory, changed):
        with pytest.raises(CheckpointError, match=r"the model of config\.json has"):
            inspect_directory(other, verify=True)
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    assert inspect_directory(directory, verify=True)["verified"]


def test_inspect_unpacks_nothing(directory: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Packed, "unpack", lambda packed: 1 / 0)
    rows = [row for row in inspect_directory(directory)["layers"] if row["outcome"]]
    assert rows
    assert all(row["density"] == pytest.approx(0.5, abs=0.05) for row in rows)


def test_a_tensor_of_another_shape_is_seen(directory: Path):
    weights = load_file(directory / "model.safetensors")
    weights["model.norm.weight"] = torch.ones(7)
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is"):
        inspect_directory(directory, verify=True)


@pytest.mark.parametrize(
    "name", ["model.norm.weight", "model.embed_tokens.weight", "model.layers.0.input_layernorm.weight"]
)
def test_a_missing_tensor_is_seen(directory: Path, name: str):
    weights = load_file(directory / "model.safetensors")
    del weights[name]
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    for use in (load, partial(inspect_directory, verify=True)):
        with pytest.raises(CheckpointError, match=rf"tensor {name} is missing from the safetensors files"):
            use(directory)


def test_a_tensor_of_another_shape_is_not_loaded(directory: Path, monkeypatch: pytest.MonkeyPatch):
    """transformers 5.17 loads it into a model with a quantiser, as is imitated here; later versions refuse it."""
    check = SemisparseQuantizer._process_model_after_weight_loading

    def loaded_as_stored(quantizer: SemisparseQuantizer, model, **kwargs):
        model.model.norm.weight = torch.nn.Parameter(torch.ones(7))
        check(quantizer, model, **kwargs)

    monkeypatch.setattr(SemisparseQuantizer, "_process_model_after_weight_loading", loaded_as_stored)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is \[7\], the model of config\.json has \[24\]"):
        load(directory)
