"""Cut vLLM's wheel to what one GPU architecture needs, so that it can be carried to a machine without a network.

    pip download --no-deps --only-binary=:all: vllm==0.24.0 --dest wheels
    python benchmarks/vllm_bundle.py wheels/vllm-0.24.0-*.whl site \\
        --drop _vllm_fa2 vllm-rs third_party/fmha_sm100 third_party/deep_gemm _qutlass_C
    tar -C site -c . | xz -9e > vllm.tar.xz

A shared object of CUDA holds fat binaries: one image per architecture, SASS or PTX. This program overwrites with zeros
the images that the GPU cannot run; zeros compress to nothing, and headers and offsets stay. A launch of a kernel whose
images are all gone fails with cudaErrorNoKernelImageForDevice. docs/experiments/serving.md has the sizes.
"""

from __future__ import annotations

import argparse
import re
import struct
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MAGIC = 0xBA55ED50
"""First word of a fat binary: magic, u16 version, u16 header bytes, u64 bytes of its images."""

PTX, SASS = 1, 2
"""Kinds of images. An image's header: u16 kind, u16, u32 header bytes, u64 payload bytes; at 28 the architecture."""

FLASH3 = r"hdim(?!64_(bf16|fp16)_(?!.*softcap)|128_(bf16|fp16)_(?!.*softcap))"
"""FlashAttention 3's source files that are dropped: all but heads of at most 64 and 128 values in 16 bits."""


@dataclass(frozen=True)
class Image:
    """One image of a fat binary.

    Args:
        kind: PTX or SASS.
        arch: 90 for sm_90 and sm_90a.
        start: offset of its payload in the file.
        stop: the end of its payload.
    """

    kind: int
    arch: int
    start: int
    stop: int


def fatbin_section(data: bytes) -> tuple[int, int]:
    """Return offset and size of the section .nv_fatbin of an ELF file; (0, 0) if it has none."""
    (table,) = struct.unpack_from("<Q", data, 0x28)
    entry, count, names = struct.unpack_from("<HHH", data, 0x3A)
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, table + i * entry) for i in range(count)]
    for section in sections:
        start = sections[names][4] + section[0]
        if data[start : data.index(b"\0", start)] == b".nv_fatbin":
            return section[4], section[5]
    return 0, 0


def fat_binaries(data: bytes) -> Iterator[list[Image]]:
    """Yield the images of each fat binary of a shared object."""
    offset, size = fatbin_section(data)
    end = offset + size
    while offset < end:
        magic, _, header, length = struct.unpack_from("<IHHQ", data, offset)
        if magic != MAGIC:
            offset += 8  # padding
            continue
        images, at = [], offset + header
        offset = at + length
        while at < offset:
            kind, _, own, payload = struct.unpack_from("<HHIQ", data, at)
            (arch,) = struct.unpack_from("<I", data, at + 28)
            images.append(Image(kind, arch, at + own, at + own + payload))
            at += own + payload
        yield images


def source_of(data: bytes, images: list[Image]) -> str:
    """Return the source file that nvcc names in a fat binary's symbols; empty if the images are compressed."""
    body = data[images[0].start : images[-1].stop]
    named = re.search(rb"_INTERNAL_[0-9a-f]{8}_\d+_(\w+?)_cu_", body)
    return named.group(1).decode() if named else ""


def cut(data: bytes, arch: int, keep_ptx: bool, drop: str) -> bytes:
    """Return a shared object without the images that are not for an architecture.

    Args:
        data: the file.
        arch: 90 for sm_90 and sm_90a.
        keep_ptx: keep the PTX of fat binaries without SASS for ``arch``, which the driver compiles at load.
        drop: regular expression; fat binaries of source files that it finds lose all images.
    """
    kept = bytearray(data)
    for images in fat_binaries(data):
        native = any(image.kind == SASS and image.arch == arch for image in images)
        dropped = re.search(drop, source_of(data, images)) is not None
        for image in images:
            runs = image.arch == arch if image.kind == SASS else keep_ptx and not native and image.arch <= arch
            if dropped or not runs:
                kept[image.start : image.stop] = bytes(image.stop - image.start)
    return bytes(kept)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--arch", type=int, default=90)
    parser.add_argument("--python", default="312", help="CPython version of extensions that have one per version")
    parser.add_argument("--keep-ptx", action="store_true")
    parser.add_argument("--drop", nargs="*", default=[], help="files whose path contains one of these are left out")
    parser.add_argument("--drop-sources", default=FLASH3, help="CUDA source files that lose all images")
    args = parser.parse_args()
    with zipfile.ZipFile(args.wheel) as wheel:
        for entry in wheel.infolist():
            version = re.search(r"\.cpython-(\d+)-", entry.filename)
            if entry.is_dir() or any(part in entry.filename for part in args.drop):
                continue
            if version and version.group(1) != args.python:
                continue
            data = wheel.read(entry)
            if entry.filename.endswith(".so"):
                data = cut(data, args.arch, args.keep_ptx, args.drop_sources)
            target = args.out / entry.filename
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)


if __name__ == "__main__":
    main()
