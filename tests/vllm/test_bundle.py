"""benchmarks/vllm_bundle.py on a made-up shared object: which images it keeps, and that offsets stay."""

from __future__ import annotations

import importlib.util
import struct
import sys
from pathlib import Path
from types import ModuleType

import pytest

SASS, PTX = 2, 1


@pytest.fixture(scope="module")
def bundle() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "vllm_bundle.py"
    spec = importlib.util.spec_from_file_location("vllm_bundle", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["vllm_bundle"] = module  # its dataclass looks itself up there
    spec.loader.exec_module(module)
    return module


def image(kind: int, arch: int, payload: bytes) -> bytes:
    return struct.pack("<HHIQ12xI32x", kind, 0, 64, len(payload), arch) + payload


def fat_binary(*images: bytes) -> bytes:
    body = b"".join(images)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def shared_object(section: bytes) -> bytes:
    """An ELF file of two sections: the fat binaries, and the sections' names."""
    names = b"\0.nv_fatbin\0.shstrtab\0"
    table = 64 + len(section) + len(names)
    header = bytearray(64)
    struct.pack_into("<Q", header, 0x28, table)
    struct.pack_into("<HHH", header, 0x3A, 64, 2, 1)
    entries = [(1, 64, len(section)), (12, 64 + len(section), len(names))]
    rows = [struct.pack("<IIQQQQIIQQ", name, 1, 0, 0, start, size, 0, 0, 0, 0) for name, start, size in entries]
    return bytes(header) + section + names + b"".join(rows)


HOPPER, AMPERE, CODE = b"hopper" * 8, b"ampere" * 8, b"source" * 8
BOTH = fat_binary(image(SASS, 80, AMPERE), image(SASS, 90, HOPPER), image(PTX, 80, CODE))
OLD = fat_binary(image(SASS, 80, AMPERE), image(PTX, 80, CODE))
NAMED = fat_binary(image(SASS, 90, b"_INTERNAL_0123abcd_9_flash_fwd_hdim256_bf16_sm90_cu_" + HOPPER))


@pytest.mark.parametrize(
    ("section", "keep_ptx", "kept", "gone"),
    [
        (BOTH, False, [HOPPER], [AMPERE, CODE]),
        (BOTH, True, [HOPPER], [AMPERE, CODE]),
        (OLD, False, [], [AMPERE, CODE]),
        (OLD, True, [CODE], [AMPERE]),
        (NAMED, False, [], [HOPPER]),
        (NAMED.replace(b"hdim256", b"hdim128"), False, [HOPPER], []),
        (NAMED.replace(b"bf16", b"e4m3").replace(b"hdim256", b"hdim128"), False, [], [HOPPER]),
    ],
)
def test_images_for_other_gpus_are_zeros(bundle: ModuleType, section: bytes, keep_ptx: bool, kept, gone):
    data = shared_object(section + bytes(8) + section)
    cut = bundle.cut(data, 90, keep_ptx, bundle.FLASH3)
    assert len(cut) == len(data)
    assert all(cut.count(payload) == 2 == data.count(payload) for payload in kept)
    assert all(cut.count(payload) == 0 < data.count(payload) for payload in gone)
    assert cut.count(struct.pack("<I", 0xBA55ED50)) == 2
    assert bundle.cut(shared_object(b""), 90, keep_ptx, bundle.FLASH3) == shared_object(b"")
