"""Directories made to crash, hang or fill the memory: each verb ends soon, with one sentence, in little memory."""

import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

import semisparse
import semisparse.engine
from semisparse import cli
from semisparse.errors import SemisparseError
from tests.limited import limited
from tests.models import byte_tokenizer, random_model

LAYER = "model.layers.1.mlp.up_proj"


@pytest.fixture(scope="module")
def compressed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("hostile") / "out"
    settings = ("search=none", "prune=magnitude")
    semisparse.compress(random_model("llama"), byte_tokenizer(), "rheosparse", None, out, settings=settings)
    (out.parent / "text.txt").write_text("some text of many words\n" * 20)
    return out


def set_layer(**values: Any) -> Callable[[dict], None]:
    """Change a layer's entry."""
    return lambda config: config["quantization_config"]["layers"][LAYER].update(values)


def set_block(**values: Any) -> Callable[[dict], None]:
    """Change the config block."""
    return lambda config: config["quantization_config"].update(values)


def set_config(**values: Any) -> Callable[[dict], None]:
    """Change config.json."""
    return lambda config: config.update(values)


LAYERS = {
    "shape 2^62": set_layer(shape=[1 << 62, 1 << 62]),
    "shape 2^62 x 1": set_layer(shape=[1 << 62, 1]),
    "shape 2^70": set_layer(shape=[1 << 70, 24]),
    "shape true": set_layer(shape=[True, 24]),
    "shape of three": set_layer(shape=[44, 24, 1]),
    "params inf": set_layer(params={"kept": float("inf")}),
    "params nan": set_layer(params={"kept": float("nan")}),
    "params 2^70": set_layer(params={"kept": 1 << 70}),
    "params list": set_layer(params=[["kept", 1]]),
    "params of 4 bits": set_layer(format="gqs", pattern="g16@50%", params={"kind": "w4", "rows": 44, "kept": 1 << 70}),
    "pattern of 10^6 digits": set_layer(pattern="6" * 10**6 + ":8"),
    "pattern of 10^6 letters": set_layer(pattern="x" * 10**6),
    "pattern 1:2^70": set_layer(pattern=f"1:{1 << 70}"),
    "pattern 1:2^40 of dense": set_layer(format="dense", pattern=f"1:{1 << 40}", params={}),
    "pattern list": set_layer(pattern=["32:64"]),
    "format is a path": set_layer(format="../../../etc/passwd"),
    "format is a module": set_layer(format="base"),
    "format of 10^6 letters": set_layer(format="x" * 10**6),
    "format list": set_layer(format=["dense"]),
    "dtype": set_layer(dtype="int8"),
    "version 10^30": set_layer(version=10**30),
    "entry list": lambda config: config["quantization_config"]["layers"].update({LAYER: [1]}),
    "entry null": lambda config: config["quantization_config"]["layers"].update({LAYER: None}),
    "layers list": set_block(layers=[LAYER]),
    "layers null": set_block(layers=None),
    "a layer named ²": lambda config: config["quantization_config"]["layers"].update({"model.layers.².q": {}}),
    "a layer of 10^5 parts": lambda config: config["quantization_config"]["layers"].update({"a." * 10**5: {}}),
    "version list": set_block(version=[1]),
    "hidden_size 2^40": set_config(hidden_size=1 << 40),
    "10^9 layers": set_config(num_hidden_layers=10**9, layer_types=None),
    "vocabulary 2^50": set_config(vocab_size=1 << 50),
    "head_dim 2^40": set_config(head_dim=1 << 40),
    "10^3 layers": set_config(num_hidden_layers=10**3, intermediate_size=10**6),
}
"""Cases that reach semisparse's own code, with whatever the directory is loaded."""

CONFIGS = {
    "block list": lambda config: config.update(quantization_config=[1]),
    "block text": lambda config: config.update(quantization_config="semisparse"),
    "no heads": set_config(num_attention_heads=0),
    "dtype of a layer list": set_layer(dtype=["float16"]),
    "block number": lambda config: config.update(quantization_config=7),
    "quant_method list": set_block(quant_method=["semisparse"]),
    "model_type of 10^5 letters": set_config(model_type="x" * 10**5),
    "model_type list": set_config(model_type=["llama"]),
    "10^9 labels": set_config(num_labels=10**9),
    "layer_types": set_config(layer_types=["full_attention"] * 3),
    "hidden_act": set_config(hidden_act="explode"),
    "rope": set_config(rope_parameters={"rope_type": "linear", "factor": "x"}),
    "attention list": set_config(attn_implementation=["eager"]),
    "dtype float7": set_config(dtype="float7"),
    "hidden_size text": set_config(hidden_size="24"),
}
"""Cases at which transformers fails before it calls semisparse."""

HARMLESS = {
    "__class__": set_block(__class__="x", __dict__={}, __init__=1),
    "to_dict": set_block(to_dict=1, from_dict=2, update=3, to_diff_dict=4),
    "density": set_layer(density="x", error=[[]], outcome={"a": 1}),
    "self": lambda config: config["quantization_config"].update({"self": 1, "config_dict": 2}),
}

DEEP = "[" * 10**5 + "]" * 10**5

TEXTS = {
    "deep config": ("config.json", f'{{"a": {DEEP}}}'),
    "deep index": ("model.safetensors.index.json", f'{{"weight_map": {DEEP}}}'),
    "deep tokenizer": ("tokenizer_config.json", f'{{"a": {DEEP}}}'),
    "a number of 10^5 digits": ("config.json", f'{{"a": {"9" * 10**5}}}'),
    "a terminal's escapes": ("config.json", '{"model_type": "\\u001b]0;title\\u0007\\u001b[2J"}'),
}
"""Files that replace the directory's, by name of the case."""

VERBS: dict[str, Callable[[Path], tuple[object, ...]]] = {
    "inspect --verify": lambda out: ("inspect", out, "--verify"),
    "generate": lambda out: ("generate", out, "--prompt", "a", "--max-new-tokens", 2),
    "eval": lambda out: ("eval", out, "--text", out.parent / "text.txt"),
    "inspect": lambda out: ("inspect", out),
    "plan": lambda out: ("plan", out, "--tokens", "1", "--formats", "dense", "--gpu", "h200"),
}
SEES_ALL = ("inspect --verify", "generate", "eval")
"""Verbs that read everything; ``inspect`` builds no model, and ``plan`` reads config.json without its block."""

SIZES = ("hidden_size 2^40", "10^9 layers", "vocabulary 2^50", "head_dim 2^40", "deep config", "no heads")
"""Cases that ``plan`` refuses."""


def run_verb(arguments: tuple[object, ...]) -> tuple[int, str]:
    """Run the command line. Returns the exit status and the text on stderr."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as errors:
        os.dup2(errors.fileno(), 2)
        sys.stderr = errors  # pytest's own object does not write to the descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.argv = ["semisparse", *map(str, arguments)]
        status = 0
        try:
            cli.main()
        except SystemExit as exit_:
            status = int(exit_.code or 0)
        sys.stderr.flush()
        errors.seek(0)
        return status, errors.read()


def load_plainly(out: Path) -> str:
    """Load with transformers. Returns ``loaded``, ``refused`` by semisparse, or the name of another exception."""
    try:
        AutoModelForCausalLM.from_pretrained(out)
    except SemisparseError:
        return "refused"
    except Exception as error:
        return type(error).__name__
    return "loaded"


def spoilt(compressed: Path, tmp_path: Path, name: str) -> Path:
    """Return a copy of the directory, changed as a case says."""
    shutil.copy(compressed.parent / "text.txt", tmp_path)
    out = Path(shutil.copytree(compressed, tmp_path / "out"))
    if name in TEXTS:
        file, text = TEXTS[name]
        (out / file).write_text(text)
        return out
    config = json.loads((out / "config.json").read_text())
    {**LAYERS, **CONFIGS, **HARMLESS}[name](config)
    (out / "config.json").write_text(json.dumps(config))
    return out


def assert_sentence(out: Path, verb: str, status: tuple[int, ...]) -> None:
    ended = limited(run_verb, VERBS[verb](out))
    assert ended.value is not None, (verb, ended)
    found, errors = ended.value
    assert found in status, (verb, errors[-2000:])
    assert "unexpected" not in errors
    assert "Traceback" not in errors
    assert "\x1b]" not in errors
    assert ("error: " in errors or "Usage: " in errors) == bool(found)
    assert not found or len(errors) < 3000


ALL = [*LAYERS, *CONFIGS, *TEXTS]
SOME = ALL[::2]
"""The cases that are not slow, each with one verb."""


@pytest.mark.parametrize(("name", "verb"), [(name, SEES_ALL[i % len(SEES_ALL)]) for i, name in enumerate(SOME)])
def test_a_verb_ends_in_a_sentence(compressed: Path, tmp_path: Path, name: str, verb: str):
    out = spoilt(compressed, tmp_path, name)
    if name in LAYERS and len(name) % 2:
        assert limited(load_plainly, out).value == "refused"
    else:
        assert_sentence(out, "generate" if name == "deep tokenizer" else verb, (1, 2))


@pytest.mark.parametrize("name", SIZES)
def test_plan_builds_no_impossible_model(compressed: Path, tmp_path: Path, name: str):
    assert_sentence(spoilt(compressed, tmp_path, name), "plan", (1, 2))


def test_plan_downloads_no_code(compressed: Path, tmp_path: Path):
    out = Path(shutil.copytree(compressed, tmp_path / "out"))
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"attn_implementation": "someone/kernels"}))
    ended = limited(run_verb, VERBS["plan"](out))
    assert ended.value[0] == 2
    assert "code from elsewhere" in ended.value[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_every_verb_ends_in_a_sentence(compressed: Path, tmp_path: Path, name: str):
    out = spoilt(compressed, tmp_path, name)
    for verb in VERBS:
        blind = verb in ("inspect", "plan") or (name == "deep tokenizer" and verb == "inspect --verify")
        assert_sentence(out, verb, (0, 1, 2) if blind else (1, 2))


@pytest.mark.parametrize("name", HARMLESS)
def test_keys_that_mean_nothing_change_nothing(compressed: Path, tmp_path: Path, name: str):
    out = spoilt(compressed, tmp_path, name)
    assert_sentence(out, "inspect --verify", (0,))
    assert_sentence(out, "generate", (0,))
    assert limited(load_plainly, out).value == "loaded"


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYERS)
def test_plain_from_pretrained_refuses(compressed: Path, tmp_path: Path, name: str):
    assert limited(load_plainly, spoilt(compressed, tmp_path, name)).value == "refused"


def test_a_child_is_limited():
    assert limited(lambda: os.kill(os.getpid(), signal.SIGTERM)).signal == signal.SIGTERM
    assert limited(lambda: time.sleep(20), seconds=0.2).signal == signal.SIGKILL
    assert limited(lambda: "filled" if bytearray(1 << 31) else "", memory=1 << 30).value is None
    assert limited(lambda: len(bytearray(1 << 28))).value == 1 << 28
