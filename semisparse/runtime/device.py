"""Facts about a device: name, architecture, SMs, shared memory, cache and memory. No other module queries them."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

GENERATIONS = ((8, 0), (9, 0), (10, 0))
"""A compute capability of each generation of GPUs whose layouts of a weight may differ: Ampere, Hopper, Blackwell."""

UNKNOWN_CACHE_BYTES = 32 << 20
"""Assumed if a CPU's last-level cache size cannot be read. Too large a value only slows benchmarks down."""

RESERVED_SHARED = 1 << 10
"""Bytes of an SM's shared memory that the CUDA driver reserves per resident CTA."""


@dataclass(frozen=True)
class DeviceFacts:
    """Facts about a device.

    Args:
        name: the vendor's name.
        kind: ``cuda`` or ``cpu``.
        arch: the architecture that kernels are compiled for, such as ``sm_90a``; of a CPU the machine type.
        sms: streaming multiprocessors of a GPU; torch's threads on a CPU.
        cache_bytes: size of a GPU's L2 cache, or of a CPU's last-level cache.
        memory_bytes: size of device memory, or of the machine's memory.
        driver: the software versions that timings depend on: CUDA and torch.
        capability: compute capability (major, minor); (0, 0) for a CPU.
        shared_per_sm: bytes of shared memory per SM.
        shared_per_cta: bytes of shared memory that one CTA may use.
    """

    name: str
    kind: str
    arch: str
    sms: int
    cache_bytes: int
    memory_bytes: int
    driver: str
    capability: tuple[int, int] = (0, 0)
    shared_per_sm: int = 0
    shared_per_cta: int = 0

    @property
    def has_pdl(self) -> bool:
        """Whether the device supports programmatic dependent launch (PDL): Hopper and later."""
        return self.capability >= (9, 0)


def device_facts(device: torch.device | str) -> DeviceFacts:
    """Return the facts about a device. They are cached per GPU, and per number of torch's threads on a CPU.

    Args:
        device: a torch device; ``cuda`` is the current GPU.
    """
    device = torch.device(device)
    if device.type == "cuda":
        return _cuda_facts(device.index if device.index is not None else torch.cuda.current_device())
    return _cpu_facts(torch.get_num_threads())


def arch_of(major: int, minor: int) -> str:
    """Return the architecture to compile for on compute capability ``major.minor``.

    From Hopper on, architecture-specific instructions (wgmma, tcgen05) need the suffix ``a``.
    """
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


@cache
def _cuda_facts(index: int) -> DeviceFacts:
    properties = torch.cuda.get_device_properties(index)
    return DeviceFacts(
        name=properties.name,
        kind="cuda",
        arch=arch_of(properties.major, properties.minor),
        sms=properties.multi_processor_count,
        cache_bytes=properties.L2_cache_size,
        memory_bytes=properties.total_memory,
        driver=f"CUDA {torch.version.cuda}, torch {torch.__version__}",
        capability=(properties.major, properties.minor),
        shared_per_sm=properties.shared_memory_per_multiprocessor,
        shared_per_cta=properties.shared_memory_per_block_optin,  # type: ignore[attr-defined]
    )


@cache
def _cpu_facts(threads: int) -> DeviceFacts:
    return DeviceFacts(
        name=_cpu_name(),
        kind="cpu",
        arch=platform.machine(),
        sms=threads,
        cache_bytes=_last_level_cache(),
        memory_bytes=_machine_memory(),
        driver=f"torch {torch.__version__}",
    )


def cpu_multiplies_int8() -> bool:
    """Return whether ``torch._int_mm`` is fast and exact on this CPU: by oneDNN, with AVX-512 VNNI."""
    return torch.backends.mkldnn.is_available() and torch.cpu._is_vnni_supported()


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _last_level_cache() -> int:
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        sizes.append(int(text[:-1]) << {"K": 10, "M": 20}[text[-1]] if text[-1] in "KM" else int(text))
    return max(sizes, default=UNKNOWN_CACHE_BYTES)


def _machine_memory() -> int:
    if hasattr(os, "sysconf"):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return 0
