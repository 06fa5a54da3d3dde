"""Seeded mutations of a compressed directory: of tensors, headers, the config block, the index and the files."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from semisparse.errors import SemisparseError
from semisparse.formats import Packed, WeightSpec
from tests.fuzz.directory import Directory, Shard
from tests.fuzz.sources import FOREIGN

SCALARS = (
    *(0, 1, -1, 2, 3, 7, 8, 16, 31, 32, 63, 64, 65, 127, 128, 255, 256, 1 << 15, 1 << 16, (1 << 31) - 1, 1 << 31),
    *(1 << 32, 1 << 40, (1 << 62) - 1, 1 << 62, 1 << 63, 1 << 70, -(1 << 31), -(1 << 63)),
    *(
        0.0,
        -0.0,
        0.5,
        1e308,
        float("inf"),
        float("-inf"),
        float("nan"),
        True,
        False,
        None,
        "",
        "x",
        "²",
        "\0",
        "x" * 9999,
    ),
)
NESTED: tuple[Any, ...] = ([], {}, [1], {"a": 1}, [[[]]], ["x"], {"": {}})
PATTERNS = (
    *("32:64", "1:64", "64:64", "16:32", "3:5", "2:4", "6:8", "4:6", "8:10", "126:128", "1:1", "1:9999999", "0:0"),
    *("0%", "70%", "99.9%", "100%", "50%/row", "99%/row", "1e9%", "g8@50%", "g4@0%", "g128@99%", "g7@50%", "g0@0%"),
    *("8:32v4", "1:256v128", "1:2v1", "1:2v129", "2:1v1", "١:٢"),
)
FORMATS = ("bitmask", "dense", "ec_csr", "gqs", "slide24", "vector_nm", "base", "../dense", "dense.storage")
TYPES = ("BOOL", "U8", "I8", "I16", "U16", "I32", "I64", "F16", "BF16", "F32", "F64", "F8_E4M3", "F8_E5M2", "X", "F4")
NAMES = {
    **{"torch.uint8": "U8", "torch.int8": "I8", "torch.int16": "I16", "torch.int32": "I32", "torch.int64": "I64"},
    **{"torch.float16": "F16", "torch.bfloat16": "BF16", "torch.float32": "F32", "torch.float8_e4m3fn": "F8_E4M3"},
}

Mutation = Callable[[Directory, random.Random], None]


def mutated(path: Path, rng: random.Random, mutations: Mapping[Mutation, float]) -> tuple[Directory, list[str]]:
    """Take a directory apart and mutate it; return it with the names of the mutations.

    Args:
        path: the directory.
        rng: draws the mutations.
        mutations: each with its share of the draws.
    """
    directory, names = Directory.read(path), []
    for mutation in rng.choices(list(mutations), weights=list(mutations.values()), k=rng.choice((1, 1, 1, 2, 3))):
        try:
            mutation(directory, rng)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError):
            continue  # an earlier mutation took away what this one changes
        names.append(mutation.__name__)
    return directory, names


def scalar(rng: random.Random) -> Any:
    """Return a value at an edge, or now and then a nested one."""
    return rng.choice(NESTED) if rng.random() < 0.15 else rng.choice(SCALARS)


def near(value: Any, rng: random.Random) -> Any:
    """Return a value that resembles another, or any."""
    if isinstance(value, int) and not isinstance(value, bool) and rng.random() < 0.6:
        return rng.choice((value + 1, value - 1, value * 2, value // 2, -value, value << 32, value + 8, value ^ 64))
    return scalar(rng)


def any_tensor(directory: Directory, rng: random.Random, packed: bool = True) -> tuple[Shard, str]:
    """Return a tensor and its file: mostly one of a packed layer's."""
    shard = rng.choice([shard for shard in directory.shards.values() if shard.names()])
    names = shard.names()
    inner = [name for name in names if not name.endswith(("weight", "bias"))]
    return shard, rng.choice(inner if inner and packed and rng.random() < 0.9 else names)


def content_of(shard: Shard, name: str) -> tuple[int, int]:
    begin, end = shard.header[name]["data_offsets"]
    if not 0 <= begin < end <= len(shard.data):
        raise ValueError
    return begin, end


def flip_bits(directory: Directory, rng: random.Random) -> None:
    shard, name = any_tensor(directory, rng)
    begin, end = content_of(shard, name)
    for _ in range(rng.choice((1, 1, 2, 8, 64))):
        shard.data[rng.randrange(begin, end)] ^= 1 << rng.randrange(8)


def write_words(directory: Directory, rng: random.Random) -> None:
    """Write numbers at an edge where a number of that width may stand."""
    shard, name = any_tensor(directory, rng)
    begin, end = content_of(shard, name)
    width = rng.choice((1, 2, 4, 8))
    for _ in range(rng.choice((1, 1, 4))):
        number = rng.choice((0, 1, -1, 255, 1 << 15, 1 << 16, (1 << 31) - 1, 1 << 31, 1 << 62, rng.getrandbits(64)))
        at = begin + rng.randrange(max(1, (end - begin) // width)) * width
        shard.data[at : at + width] = (number % (1 << 8 * width)).to_bytes(width, "little")[: end - at]


def fill(directory: Directory, rng: random.Random) -> None:
    shard, name = any_tensor(directory, rng)
    begin, end = content_of(shard, name)
    first = rng.choice((begin, rng.randrange(begin, end)))
    last = rng.choice((end, rng.randrange(first, end) + 1))
    octet = rng.choice((0, 0xFF, 0x7F, 0x80, 0x01, None))
    shard.data[first:last] = rng.randbytes(last - first) if octet is None else bytes([octet]) * (last - first)


def rotate(directory: Directory, rng: random.Random) -> None:
    """Move a tensor's bytes on by some elements."""
    shard, name = any_tensor(directory, rng)
    begin, end = content_of(shard, name)
    by = rng.choice((1, 2, 4, 8, 64)) % (end - begin)
    shard.data[begin:end] = shard.data[begin + by : end] + shard.data[begin : begin + by]


def swap_tensors(directory: Directory, rng: random.Random) -> None:
    shard, one = any_tensor(directory, rng)
    other = rng.choice(shard.names())
    header = shard.header
    if rng.random() < 0.5:
        header[one], header[other] = header[other], header[one]
    else:
        header[one]["data_offsets"], header[other]["data_offsets"] = (
            header[other]["data_offsets"],
            header[one]["data_offsets"],
        )


def change_header(directory: Directory, rng: random.Random) -> None:
    shard, name = any_tensor(directory, rng)
    entry = shard.header[name]
    key = rng.choice(("dtype", "shape", "data_offsets"))
    if key == "dtype":
        entry[key] = rng.choice(TYPES)
    elif rng.random() < 0.2:
        entry[key] = scalar(rng)
    elif key == "shape" and rng.random() < 0.4:
        entry[key] = rng.choice((entry[key][::-1], [*entry[key], 1], entry[key][1:], [0], [-1]))
    else:
        at = rng.randrange(len(entry[key]))
        entry[key][at] = near(entry[key][at], rng)


def rename_tensor(directory: Directory, rng: random.Random) -> None:
    shard, name = any_tensor(directory, rng)
    entry = shard.header.pop(name)
    other = rng.choice((name + "x", name.upper(), "x", "", name.replace("layers.0", "layers.1"), "__metadata__"))
    if rng.random() < 0.7:
        shard.header[other] = entry


def copy_tensor(directory: Directory, rng: random.Random) -> None:
    """Store a tensor under a second name, or a name in a second file."""
    shard, name = any_tensor(directory, rng)
    begin, end = content_of(shard, name)
    target = rng.choice(list(directory.shards.values()))
    first = len(target.data)
    target.data += shard.data[begin:end]
    other = name if target is not shard else rng.choice((name + "2", "lm_head.weight", "model.embed_tokens.weight"))
    target.header[other] = {**shard.header[name], "data_offsets": [first, first + end - begin]}


def change_entry(directory: Directory, rng: random.Random) -> None:
    entry = rng.choice(list(directory.entries.values()))
    key = rng.choice(("format", "version", "pattern", "shape", "dtype", "params", "digests", "density", "error"))
    choices: dict[str, Callable[[], Any]] = {
        "format": lambda: rng.choice(FORMATS),
        "pattern": lambda: rng.choice(PATTERNS),
        "dtype": lambda: rng.choice(("float16", "bfloat16", "float32", "float64", "int8")),
        "shape": lambda: [near(size, rng) for size in entry["shape"]],
    }
    entry[key] = choices[key]() if key in choices and rng.random() < 0.8 else near(entry[key], rng)


def change_params(directory: Directory, rng: random.Random) -> None:
    params = rng.choice(list(directory.entries.values()))["params"]
    others = ("kind", "kept", "rows", "layout", "blocks", "panel_rows", "span", "span_limit", "x", "")
    key = rng.choice([*params, *others])
    if key in params and rng.random() < 0.2:
        del params[key]
    else:
        params[key] = rng.choice(("int8", "fp8", "int4", "w4", "w3", "paper", "banks", near(params.get(key), rng)))


def declare_anew(directory: Directory, rng: random.Random) -> None:
    """Declare a layer as another format, pattern or params would, with tensors of just those dtypes and shapes."""
    name = rng.choice(list(directory.entries))
    entry = directory.entries[name]
    others = [other for other in directory.entries.values() if other is not entry]
    donor = rng.choice(others)
    changed = dict(entry)
    for key in rng.choice((("format", "pattern", "params"), ("pattern",), ("params",), ("shape",), ("dtype",), ())):
        changed[key] = donor[key]
    if rng.random() < 0.5:
        changed["params"] = dict(changed["params"])
        key = rng.choice(list(changed["params"]))
        changed["params"][key] = near(changed["params"][key], rng)
    for key, size in (("rows", 0), ("n", 0), ("k", 1)):
        if key in changed["params"] and rng.random() < 0.8:
            changed["params"] = changed["params"] | {key: entry["shape"][size]}
    if rng.random() < 0.2:
        changed["pattern"] = rng.choice(PATTERNS)
    try:
        packed = Packed.empty(WeightSpec.from_dict(changed))
    except (SemisparseError, RuntimeError):
        raise ValueError from None
    if packed.nbytes > 1 << 20:
        raise ValueError
    directory.entries[name] = changed
    for tensor, expected in packed.tensors.items():
        dtype, shape = NAMES[str(expected.dtype)], list(expected.shape)
        put_tensor(directory, f"{name}.{tensor}", dtype, shape, expected.nbytes, rng)


def put_tensor(directory: Directory, name: str, dtype: str, shape: list[int], nbytes: int, rng: random.Random) -> None:
    """Give a tensor a dtype and shape; what its content lacks is filled up."""
    shard = directory.shard_of(name)
    if shard is None:
        shard = rng.choice(list(directory.shards.values()))
        shard.header[name] = {"data_offsets": [len(shard.data)] * 2}
        if directory.index is not None:
            file = next(file for file, each in directory.shards.items() if each is shard)
            directory.index["weight_map"][name] = file
    begin, end = shard.header[name]["data_offsets"]
    content = bytes(shard.data[begin:end])[:nbytes]
    missing = nbytes - len(content)
    content += rng.choice((bytes(missing), rng.randbytes(missing), bytes([255]) * missing))
    shard.resize(name, dtype, shape, content)


def change_block(directory: Directory, rng: random.Random) -> None:
    block = directory.config["quantization_config"]
    names = list(block["layers"])
    one, other = rng.choice(names), rng.choice(names)
    kind = rng.randrange(6)
    if kind == 0:
        block["layers"][one], block["layers"][other] = block["layers"][other], block["layers"][one]
    elif kind == 1:
        block["layers"][rng.choice((one + "x", "", "lm_head", "model", "model.embed_tokens", "²", "a" * 5000))] = block[
            "layers"
        ].pop(one)
    elif kind == 2:
        del block["layers"][one]
    elif kind == 3:
        block["layers"][one] = scalar(rng)
    elif kind == 4:
        block[rng.choice(("quant_method", "version", "layers", "recipe", "to_dict", "__class__", "self"))] = scalar(rng)
    else:
        directory.config["quantization_config"] = scalar(rng)


def change_digests(directory: Directory, rng: random.Random) -> None:
    """Change a layer's digests: their algorithm, which their length tells, their names, or one of them."""
    digests = rng.choice(list(directory.entries.values()))["digests"]
    name = rng.choice(list(digests))
    kind = rng.randrange(4)
    if kind == 0:
        digests.update({each: rng.choice(("0" * 32, digest[:32])) for each, digest in digests.items()})
    elif kind == 1:
        digests[name] = rng.choice((digests[name].upper(), digests[name][::-1], digests[name][:31], scalar(rng)))
    elif kind == 2:
        digests[name + "x"] = digests.pop(name)
    else:
        digests.clear()


def change_method(directory: Directory, rng: random.Random) -> None:
    """Change a value of another tool's ``quantization_config``, however deep it is."""
    at = directory.config["quantization_config"]
    while True:
        keys = [*at, "bits", "group_size", "dynamic", "x"] if isinstance(at, dict) else range(len(at))
        key = rng.choice(keys)
        if isinstance(at, dict) and isinstance(at.get(key), dict | list) and rng.random() < 0.8:
            at = at[key]
            continue
        if isinstance(at, dict) and key in at and rng.random() < 0.2:
            del at[key]
        else:
            before = at.get(key) if isinstance(at, dict) else at[key]
            at[key] = rng.choice((2, 3, 4, 5, 8, -1, 16, 32, "gptq_v2", "gemm", "group", near(before, rng)))
        return


def change_config(directory: Directory, rng: random.Random) -> None:
    config = directory.config
    others = ("attn_implementation", "auto_map", "num_labels", "head_dim", "layer_types", "hidden_act")
    key = rng.choice([*config, *others])
    config[key] = near(config.get(key), rng)


def change_index(directory: Directory, rng: random.Random) -> None:
    if directory.index is None:
        file = next(iter(directory.shards))
        directory.index = {"metadata": {}, "weight_map": dict.fromkeys(directory.shards[file].names(), file)}
    weight_map = directory.index["weight_map"]
    name = rng.choice(list(weight_map))
    files = [*directory.shards, "../whole/model.safetensors", "/dev/zero", "", ".", "x.safetensors", "config.json"]
    kind = rng.randrange(4)
    if kind == 0:
        weight_map[name] = rng.choice(files)
    elif kind == 1:
        del weight_map[name]
    elif kind == 2:
        weight_map[name] = scalar(rng)
    else:
        directory.index[rng.choice(("weight_map", "metadata", "x"))] = scalar(rng)


def change_file(directory: Directory, rng: random.Random) -> None:
    """Change a file after it was written: cut, grow with a hole, flip bits, or replace it by what is no file."""
    names = ["config.json", "model.safetensors.index.json", *directory.shards]
    name, kind, seed = rng.choice(names), rng.choice(list(FILE_CHANGES)), rng.random()
    directory.later.append(lambda path: kind(path / name, random.Random(seed)))


def cut(file: Path, rng: random.Random) -> None:
    os.truncate(file, rng.choice((0, 1, 7, 8, 9, rng.randrange(file.stat().st_size))))


def grow(file: Path, rng: random.Random) -> None:
    os.truncate(file, file.stat().st_size + rng.choice((1, 4096, 1 << 30, 1 << 40)))


def read_small(file: Path) -> bytes:
    """Read a file, unless an earlier mutation has made it huge."""
    if not file.is_file() or file.stat().st_size > 1 << 20:
        raise ValueError
    return file.read_bytes()


def flip_file(file: Path, rng: random.Random) -> None:
    content = bytearray(read_small(file))
    for _ in range(rng.choice((1, 1, 3, 30))):
        content[rng.randrange(min(len(content), rng.choice((8, 64, 4096, 1 << 20))))] ^= 1 << rng.randrange(8)
    file.write_bytes(content)


def splice(file: Path, rng: random.Random) -> None:
    content = read_small(file)
    at = rng.randrange(len(content))
    file.write_bytes(content[:at] + rng.choice((b"[" * 10**5, b"\xff\xfe", b"1" * 5000, b"{}", b'"')) + content[at:])


def replace_file(file: Path, rng: random.Random) -> None:
    file.unlink()
    kind = rng.randrange(6)
    if kind == 0:
        file.mkdir()
    elif kind == 1:
        os.mkfifo(file)
    elif kind == 2:
        file.touch()
    else:
        others = (file.name, "/dev/zero", "/dev/null", "config.json", "..", "/nonexistent", str(file.parent / "x"))
        file.symlink_to(rng.choice(others))


FILE_CHANGES = (cut, grow, flip_file, splice, replace_file)

MUTATIONS: dict[Mutation, float] = {
    **{flip_bits: 3, write_words: 4, fill: 3, rotate: 1, swap_tensors: 2, change_header: 2, rename_tensor: 1},
    **{copy_tensor: 1, change_entry: 3, change_params: 2, declare_anew: 6, change_block: 2, change_config: 2},
    **{change_index: 2, change_file: 2},
}
"""The mutations of ``whole`` and ``sharded``, each with its share of the draws; one more would change their cases."""

WITH_DIGESTS = MUTATIONS | {change_digests: 1}
"""Those of the other directories that semisparse wrote."""

OF_OTHER_TOOLS: dict[Mutation, float] = {
    **{flip_bits: 2, write_words: 3, fill: 2, rotate: 1, swap_tensors: 3, change_header: 4, rename_tensor: 2},
    **{copy_tensor: 1, change_method: 6, change_config: 3, change_index: 1, change_file: 1},
}
"""Those of directories that other tools wrote."""


def mutations_of(source: str) -> Mapping[Mutation, float]:
    """Return the mutations of a directory of `sources.SOURCES`."""
    if source in FOREIGN:
        return OF_OTHER_TOOLS
    return MUTATIONS if source in ("whole", "sharded") else WITH_DIGESTS
