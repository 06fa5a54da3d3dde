"""``python -m tests.fuzz.attacks OUT.csv``: files made by hand, each used in a process with limits on memory and time.

A row of the CSV has the row of docs/experiments/attacks.md, the attack, how it ended, its seconds, and the megabytes
that the process took beyond what it was forked with.
"""

from __future__ import annotations

import csv
import json
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import semisparse
from semisparse.errors import SemisparseError
from semisparse.formats import Packed, WeightSpec
from semisparse.formats.base import Params, get_format
from semisparse.nn import SparseLinear
from semisparse.patterns import parse_pattern
from tests.cli.test_hostile import LAYER, run_verb
from tests.limited import limited
from tests.models import byte_tokenizer, random_model

SECONDS = 60

Attack = tuple[int, str, Callable[[], str]]

OBEYS: dict[str, tuple[str, dict[str, Any], str]] = {
    "bitmask": ("70%", {}, "row_starts"),
    "bitmask w8": ("70%", {"kind": "w8"}, "row_starts"),
    "bitmask w4": ("70%", {"kind": "w4"}, "row_starts"),
    "ec_csr": ("70%", {}, "panel_loads"),
    "gqs": ("g16@50%", {}, "starts"),
    "vector_nm": ("8:32v32", {}, "positions"),
}
"""Pattern, pack options and a tensor of indices, by format and kind."""


def packed_of(name: str, k: int = 128) -> Packed:
    pattern, options, _ = OBEYS[name]
    weight = torch.randn(64, k, generator=torch.Generator().manual_seed(0))
    return semisparse.pack(weight * parse_pattern(pattern).mask(weight.abs()), name.split()[0], pattern, **options)


def verb(*arguments: object) -> str:
    status, errors = run_verb(arguments)
    last = [line for line in errors.splitlines() if line.startswith(("error: ", "warning: "))]
    return f"status {status}: {last[-1][:200] if last else 'no error'}"


def with_layer(path: Path, name: str, entry: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    """Copy a directory, with one layer declared and stored by hand."""
    out = Path(shutil.copytree(path, path.parent / name))
    stored = {k: v for k, v in load_file(out / "model.safetensors").items() if not k.startswith(f"{LAYER}.")}
    save_file(stored | {f"{LAYER}.{k}": v for k, v in tensors.items()}, out / "model.safetensors", {"format": "pt"})
    return changed(out, lambda config: config["quantization_config"]["layers"].update({LAYER: entry}))


def changed(path: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    config = json.loads((path / "config.json").read_text())
    change(config)
    (path / "config.json").write_text(json.dumps(config))
    return path


def damaged_state(name: str) -> str:
    layer, key = SparseLinear(packed_of(name)), OBEYS[name][2]
    state = {k: v.clone() for k, v in layer.state_dict().items()}
    state[key].view(-1)[len(state[key].view(-1)) // 2] = 99 if state[key].dtype == torch.uint8 else 1 << 30
    layer.load_state_dict(state)
    return f"taken: {layer(torch.randn(2, 128)).isfinite().all()}"


def shortened(name: str) -> str:
    packed = packed_of(name)
    tensors = {key: tensor[: max(1, len(tensor) // 4)] for key, tensor in packed.tensors.items()}
    return str(semisparse.linear(torch.randn(2, 128), Packed(packed.spec, tensors)).shape)


def freed() -> str:
    packed = packed_of("bitmask")
    for tensor in packed.tensors.values():
        tensor.untyped_storage().resize_(0)
    return str(semisparse.linear(torch.randn(2, 128), packed).shape)


def assigned() -> str:
    layer = SparseLinear(packed_of("bitmask"))
    state = {
        name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in layer.state_dict().items()
    }
    layer.load_state_dict(state, assign=True)
    return f"taken: {layer(torch.randn(2, 128)).isfinite().all()}"


def emptied(name: str) -> str:
    layer = SparseLinear(packed_of(name)).to("meta").to_empty(device="cpu")
    for parameter in layer.parameters():
        parameter.view(torch.uint8).fill_(99)  # as memory that was used before
    return f"taken: {layer(torch.randn(2, 128)).isfinite().all()}"


def not_finite(name: str) -> str:
    packed = packed_of(name)
    tensors = {k: v.clone() for k, v in packed.tensors.items()}
    next(v for v in tensors.values() if v.is_floating_point()).view(-1)[0] = torch.nan
    get_format(packed.spec.format).verify(Packed(packed.spec, tensors))
    return "passes"


def broken_pattern(name: str, declared: str) -> str:
    packed = packed_of(name)
    values = packed.spec.to_dict() | {"pattern": declared}
    get_format(packed.spec.format).verify(Packed(WeightSpec.from_dict(values), packed.tensors))
    return "passes"


def files(root: Path, small: Path, dense: Path) -> Iterator[Attack]:
    """Yield the attacks by files and flags; rows as in the page."""
    declared = packed_of("ec_csr").spec.to_dict()
    for n, k in ((1, 1 << 37), (1, 1 << 30), (64, 1 << 24)):
        entry = declared | {"shape": [n, k], "params": declared["params"] | {"n": n, "k": k}}
        out = with_layer(small, f"one-{n}-{k}", entry, packed_of("ec_csr").tensors)
        yield 1, f"ec_csr {n} x {k}, inspect --verify", lambda out=out: verb("inspect", out, "--verify")
    out = Path(shutil.copytree(small, root / "two"))
    names = list(load_file(out / "model.safetensors"))
    (root / "elsewhere").mkdir()
    shutil.copy(out / "model.safetensors", root / "elsewhere" / "x.safetensors")
    (out / "model.safetensors").rename(out / "x.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, "../elsewhere/x.safetensors")}
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
    yield 2, "index to ../elsewhere, a decoy inside; generate", lambda: verb("generate", out, "--prompt", "a")
    yield 2, "the same, from_pretrained", lambda: str(type(AutoModelForCausalLM.from_pretrained(out)))
    own = changed(
        Path(shutil.copytree(small, root / "three")),
        lambda c: c.update(model_type="own", auto_map={"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}),
    )
    (own / "own.py").write_text(f"open({str(root / 'ran')!r}, 'w').close()\nclass Own: pass\n")
    for arguments in (("generate", own, "--prompt", "a"), ("plan", own), ("inspect", own, "--verify")):
        yield 3, f"auto_map, {arguments[0]}", lambda a=arguments: f"{verb(*a)} | ran: {(root / 'ran').exists()}"
    wide = {"format": "slide24", "version": get_format("slide24").version, "pattern": "67108864:67108866"}
    wide |= {"shape": [44, 24], "dtype": "bfloat16", "params": {}}
    out4 = with_layer(small, "four", wide, {})
    yield 4, "slide24 67108864:67108866, inspect --verify", lambda: verb("inspect", out4, "--verify")
    empty = semisparse.pack(torch.zeros(512, 65536, dtype=torch.bfloat16), "ec_csr", "99%")
    out5 = with_layer(small, "five", empty.spec.to_dict() | {"density": 0.0}, empty.tensors)
    yield 5, f"ec_csr 512 x 65536 in {empty.nbytes} bytes, inspect", lambda: verb("inspect", out5)
    yield 5, "the same, inspect --verify", lambda: verb("inspect", out5, "--verify")
    recipes = {"aliases": "a: &a [x]\nb: &b [*a, *a]\nignore: [*b, *b]\n", "brackets": "ignore: " + "[" * 20000}
    for name, text in recipes.items():
        (root / f"{name}.yaml").write_text(text)
        arguments = ("compress", dense, "--recipe", root / f"{name}.yaml", "--out", root / "ten")
        yield 10, f"YAML with {name}", lambda a=arguments: verb(*a)
    eleven = ("compress", dense, "--recipe", "rheosparse", "--out", root / "eleven")
    yield 11, "no --calib", lambda: f"{verb(*eleven)} | left: {[file.name for file in root.glob('eleven*')]}"
    double = changed(Path(shutil.copytree(small, root / "double")), lambda c: c.update(hidden_size=48))
    yield 18, "hidden_size doubled, inspect --verify", lambda: verb("inspect", double, "--verify")
    window = changed(Path(shutil.copytree(small, root / "window")), lambda c: c.update(sliding_window=1 << 70))
    yield 16, "sliding_window 2^70, generate", lambda: verb("generate", window, "--prompt", "a")
    yield 16, "plan --shape 2^31,2^31", lambda: verb("plan", "--shape", f"{1 << 31},{1 << 31}")
    huge = changed(Path(shutil.copytree(small, root / "huge")), lambda c: c.update(num_hidden_layers=10**9))
    yield 19, "10^9 layers, plan", lambda: verb("plan", huge)
    kernels = changed(Path(shutil.copytree(small, root / "kernels")), lambda c: c.update(attn_implementation="x/y"))
    yield 19, "attn_implementation x/y, plan", lambda: verb("plan", kernels)


def tensors() -> Iterator[Attack]:
    """Yield the attacks on Python's interface."""
    packed, x = packed_of("bitmask"), torch.randn(2, 128)
    meta = Packed(packed.spec, {name: tensor.to("meta") for name, tensor in packed.tensors.items()})
    yield 6, "x on cpu, weight on meta", lambda: str(semisparse.linear(x, meta).shape)
    lacking = Packed(packed.spec, {"values": packed.tensors["values"]})
    yield 6, "a weight without its masks", lambda: str(semisparse.linear(x, lacking).shape)
    for name in OBEYS:
        yield 6, f"{name} with tensors too short", lambda name=name: shortened(name)
    yield 6, "a weight whose memory was freed", freed
    yield 7, "load_state_dict(assign=True), float64 values", assigned
    for name in OBEYS:
        yield 7, f"to_empty without loading, {name}", lambda name=name: emptied(name)
    for name, (_, _, key) in OBEYS.items():
        yield 7, f"load_state_dict, {name}, {key}", lambda name=name: damaged_state(name)
    for name in OBEYS:
        yield 8, f"NaN, {name}", lambda name=name: not_finite(name)
    for name, declared in (("bitmask", "90%"), ("bitmask w4", "90%/row"), ("ec_csr", "90%"), ("gqs", "g16@75%")):
        yield 8, f"{name} declared {declared}", lambda a=(name, declared): broken_pattern(*a)
    wide = WeightSpec("slide24", 1, parse_pattern("6:8"), (1 << 62, 1 << 62), torch.bfloat16, Params())
    yield 16, "shape 2^62 x 2^62", lambda: str(Packed.empty(wide))
    yield 16, "pack(list)", lambda: str(semisparse.pack([[1.0]], "dense", "0%"))  # type: ignore[arg-type]
    yield 16, "0-d x", lambda: str(semisparse.linear(torch.tensor(1.0), packed))
    yield 16, "integer x", lambda: str(semisparse.linear(x.int(), packed))


def attempt(work: Callable[[], str]) -> tuple[str, int]:
    """Return the outcome, and the megabytes by which the peak of this process grew."""
    Path("/proc/self/clear_refs").write_text("5")
    before = peak()
    try:
        outcome = work()
    except SemisparseError as error:
        outcome = f"{type(error).__name__}: {str(error)[:200]}"
    except BaseException as error:
        outcome = f"UNTYPED {type(error).__name__}: {str(error)[:200]}"
    return outcome, peak() - before


def peak() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) // 1024


def main(out: Path) -> None:
    """Run every attack and write the CSV; the exit status is 1 if one ended in a signal or an untyped exception."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.simplefilter("ignore")
    rows, bad = [], 0
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        random_model("llama").save_pretrained(root / "dense")
        byte_tokenizer().save_pretrained(root / "dense")
        settings = ("search=none", "prune=magnitude")
        semisparse.compress(root / "dense", recipe="rheosparse", out=root / "small", settings=settings)
        for row, what, work in (*files(root, root / "small", root / "dense"), *tensors()):
            ended = limited(attempt, work, seconds=SECONDS)
            outcome, megabytes = ended.value or (f"SIGNAL {ended.signal}", "")
            bad += outcome.startswith(("SIGNAL", "UNTYPED")) or "unexpected" in outcome
            rows.append((row, what, outcome.replace(scratch, ""), f"{ended.seconds:.2f}", megabytes))
            print(*rows[-1], sep=" | ", flush=True)
    with out.open("w", newline="") as file:
        csv.writer(file).writerows([("row", "attack", "outcome", "seconds", "megabytes"), *sorted(rows)])
    sys.exit(bool(bad))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
