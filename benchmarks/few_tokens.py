"""The GEMMs of runtime/expand_gemm for few tokens: mma.sync or wgmma, in many shapes, beside other kernels and cuBLAS.

    python benchmarks/few_tokens.py results/h200/sweeps/few-tokens.csv [--seconds 60] [--formats bitmask,gqs]

Needs a Hopper GPU. float16, microseconds of CUDA graphs over weights that outgrow the cache. Every output is compared
with float32 before it is timed, twice: all builds forwards, then backwards. Column `macros` has what a build is also
compiled with; "chosen" is the kernel that `auto` takes. A file `gemm_before.cu` beside bitmask's gemm.cu is timed, too.
``--once`` launches builds once, for a profiler, without PDL.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from ec_csr_gemm import in_tiles
from every_token import copies_of, inputs
from gqs_gemm import checked_error, timed
from rows import write_rows
from torch import Tensor
from torch.nn import functional as F
from turns import turn

from semisparse.bench import timing
from semisparse.bench.kernels import TOLERANCE
from semisparse.bench.roofline import random_weight
from semisparse.errors import KernelError
from semisparse.formats import Packed, get_format
from semisparse.formats.bitmask.cuda import gemm as bitmask
from semisparse.formats.bitmask.cuda.schedule import gemm_tiles
from semisparse.formats.bitmask.storage.disk import BLOCK
from semisparse.formats.bitmask.storage.gpu import tiling
from semisparse.formats.ec_csr.cuda import gemm as ec_csr
from semisparse.formats.ec_csr.cuda.tile_schedule import tiles_in
from semisparse.formats.gqs.cuda import gemm_wgmma as gqs
from semisparse.formats.gqs.cuda.wgmma_schedule import tiles_of as gqs_tiles
from semisparse.formats.gqs.storage.disk import code_bits, group_size
from semisparse.formats.product import problem_of
from semisparse.formats.vector_nm.cuda import gemm_wgmma as vector_nm
from semisparse.formats.vector_nm.cuda.wgmma_schedule import tiles_of as vector_nm_tiles
from semisparse.formats.vector_nm.storage.disk import vectors_of
from semisparse.patterns import parse_pattern
from semisparse.runtime import expand_gemm
from semisparse.runtime.device import device_facts
from semisparse.runtime.expand_gemm import Schedule, Tiles, fit
from semisparse.runtime.nvrtc import Defines

GPU, DTYPE = torch.device("cuda"), torch.float16
LARGE, SMALL = (28672, 8192), (4096, 4096)
SHAPES = (LARGE, SMALL, (11008, 4096), (4096, 11008))
WEIGHTS: dict[str, tuple[str, str, dict[str, str]]] = {
    "bitmask": ("bitmask", "32:64", {}),
    "gqs": ("gqs", "g16@50%", {"kind": "w4"}),
    "gqs-w4": ("gqs", "g128@0%", {"kind": "w4"}),
    "gqs-w2": ("gqs", "g64@0%", {"kind": "w2"}),
    "vector_nm": ("vector_nm", "16:32v32", {}),
    "ec_csr": ("ec_csr", "70%", {}),
}
KERNELS: dict[str, Any] = {"bitmask": bitmask, "gqs": gqs, "vector_nm": vector_nm, "ec_csr": ec_csr}
MMA, WGMMA, HALF_GROUPS, ONE_WARP = ("MMA_SYNC", 1), ("MMA_SYNC", 0), ("GROUP_STEPS", 2), ("COPY_WARPS", 1)
PRODUCERS = ("PRODUCER_WARPGROUPS", 2)
Weights = dict[str, list[tuple[Tensor, Packed]]]
COLUMNS = (
    *("n", "k", "m", "dtype", "weights", "kernel", "macros", *Schedule.__dataclass_fields__),
    *("us", "low_us", "high_us", "error", "megabytes", "machine"),
)


@dataclass(frozen=True)
class Build(Schedule):
    """A schedule with further macros."""

    macros: tuple[tuple[str, int], ...] = ()

    @property
    def threads(self) -> int:
        """Threads per CTA."""
        return 32 * self.warps + 128 * dict(self.macros).get("PRODUCER_WARPGROUPS", 1)

    def defines(self, dtype: torch.dtype) -> Defines:
        """Return the schedule's macros and the further ones."""
        fields = asdict(self)
        del fields["macros"]
        return {**Schedule(**fields).defines(dtype), **dict(self.macros)}


@dataclass(frozen=True)
class Try:
    """A build to time: tile_m, warpgroups, CTAs per SM, macros; ``split`` divides K so that the grid fills the SMs."""

    tile_m: int
    warpgroups: int
    ctas: int
    macros: tuple[tuple[str, int], ...] = (WGMMA,)
    split: bool = False
    cluster: int = 1

    def build(self, weight: Tiles, m: int) -> Build | None:
        """Return the build with the most stages that fit, or None."""
        facts, split = device_facts(GPU), 0
        if self.split:
            outputs = -(-weight.row_tiles // (4 * self.warpgroups)) * -(-m // self.tile_m)
            split = min(8, weight.column_tiles, max(1, self.ctas * facts.sms // outputs))
        found = fit(weight, facts, self.tile_m, self.warpgroups, self.cluster, split, self.ctas)
        return None if found is None else Build(**asdict(found), macros=self.macros)


def tries(m: int, large: bool, name: str) -> list[Try]:
    """Return what to time for M tokens, the most important first."""
    copies = [(WGMMA, ONE_WARP)] if name == "bitmask" else [(WGMMA, PRODUCERS)] if name == "vector_nm" else []
    half = (WGMMA, HALF_GROUPS)
    if not large:
        tile = 8 if m <= 8 else 16 if m <= 16 else 32
        found = [Try(tile, *shape, (MMA,), True) for shape in ((1, 3), (2, 2), (1, 2), (2, 1)) if m <= 32]
        return found + [Try(max(16, m), 1, 3, macros, True) for macros in ((WGMMA,), *copies) if m <= 64]
    if m <= 16:
        found = [Try(8 if m <= 8 else 16, warpgroups, 1, (MMA,)) for warpgroups in (6, 5, 4)]
        more = [Try(found[1].tile_m, 5, 1, (MMA, PRODUCERS))] if name == "vector_nm" else []
        return [*found, *more, Try(16, 4, 1)]
    wide = [Try(m, 5, 1, half)] if name not in ("gqs", "vector_nm") and m <= 64 else []  # these two would spill
    if m == 32:
        found = [Try(32, 5, 1, (MMA,)), Try(32, 4, 1, (MMA,)), *wide, Try(32, 4, 1)]
        return found + [Try(32, 4, 1, macros) for macros in copies]
    if m == 64:
        found = [*wide, Try(64, 4, 1, half), Try(64, 4, 1), Try(64, 3, 1)]
        return found + [Try(64, 3, 1, macros) for macros in copies]
    if m == 128:
        return [Try(128, 3, 1, macros) for macros in ((WGMMA,), half, *copies)]
    # Two producer warpgroups would leave too few registers at launch.
    return [Try(256, 2, 1, macros, False, 2) for macros in ((WGMMA,), *copies) if PRODUCERS not in macros]


def tiles_of(packed: Packed) -> Tiles:
    """Return the tiles of a weight's GEMM."""
    spec, (n, k) = packed.spec, packed.shape
    if spec.format == "bitmask":
        return gemm_tiles(tiling(spec))
    if spec.format == "ec_csr":
        return tiles_in(spec)
    if spec.format == "vector_nm":
        return vector_nm_tiles(n, k, vectors_of(spec.pattern))
    size = group_size(spec.pattern)
    return gqs_tiles(n, k, code_bits(spec.params, size), size, bool(spec.params.get("full")))


def pack(name: str, n: int, k: int) -> tuple[Tensor, Packed]:
    """Return a random weight, dense and packed."""
    form, pattern, options = WEIGHTS[name]
    dense = random_weight(parse_pattern(pattern), n, k, DTYPE, GPU)
    if form == "ec_csr":
        return dense, in_tiles(dense)
    packed = get_format(form).pack(dense, parse_pattern(pattern), **options).to(GPU)
    return packed.unpack(), packed


def builds(name: str, packed: Packed, m: int) -> list[Build]:
    """Return the builds to time."""
    found = (one.build(tiles_of(packed), m) for one in tries(m, packed.shape == LARGE, name))
    return [build for build in found if build is not None]


def products(name: str, packed: Packed, x: Tensor) -> Iterator[tuple[str, Build | None, Callable[..., Tensor]]]:
    """Yield kernel, build and matmul; the chosen kernel first."""
    form = packed.spec.format
    if form != "ec_csr":
        chosen = get_format(form).choose(problem_of(x, packed))
        yield f"chosen: {chosen.name}", None, chosen.prepare(problem_of(x, packed))
    for build in builds(name, packed, len(x)):
        yield "gemm", build, KERNELS[form].prepare(problem_of(x, packed), build)
    build = next(iter(reversed(builds(name, packed, len(x)))), None)
    if (before := before_product(packed, x, build)) is not None:
        yield "gemm before", build, before


def before_product(packed: Packed, x: Tensor, build: Build | None) -> Callable[..., Tensor] | None:
    """Return bitmask's matmul of gemm_before.cu; None for other formats, few tokens, or without the file."""
    path = bitmask.GEMM.path.with_name("gemm_before.cu")
    if packed.spec.format != "bitmask" or len(x) <= 16 or build is None or not path.exists():
        return None
    weight, source = tiling(packed.spec), replace(bitmask.GEMM, path=path)
    tiles = gemm_tiles(weight)
    macros = bitmask.gemm_defines(DTYPE, weight.keep, build, weight.bits)
    kernel = source.build("semisparse_bitmask_gemm", macros, build.shared(tiles))
    product = expand_gemm.prepare(lambda _: kernel, build, tiles, BLOCK, packed.shape, GPU)
    return lambda x, one, bias: product(x, {"tiles": one.tensors["tiles"]}, bias)


def row(packed: Packed, m: int, name: str, kernel: str, build: Build | None, times: dict[str, str]) -> dict[str, str]:
    """Return a CSV row."""
    values: dict[str, Any] = {**(asdict(build) if build else {}), **times, "m": m, "weights": name, "kernel": kernel}
    values["macros"] = " ".join(f"{macro}={value}" for macro, value in build.macros) if build else ""
    values |= {
        "n": packed.shape[0],
        "k": packed.shape[1],
        "dtype": "float16",
        "megabytes": f"{packed.nbytes / 1e6:.1f}",
    }
    values["machine"] = torch.cuda.get_device_name()
    return {column: str(values.get(column, "")) for column in COLUMNS}


def measure(name: str, dense: Tensor, packed: Packed, tokens: list[int]) -> Iterator[dict[str, str]]:
    """Time every build on one weight, forwards and then backwards, so that no build always follows the same one."""
    copies = timing.rotating_copies(packed, device_facts(GPU).cache_bytes)
    for x, expected in inputs(tokens, dense.shape[1], dense):
        check = partial(checked_error, expected, TOLERANCE[DTYPE])
        if name == "bitmask":
            calls: list[Callable[[], Tensor]] = [partial(F.linear, x, one) for one in copies_of(dense)]
            yield row(packed, len(x), "dense", "cuBLAS", None, timed(calls, check))
        ready = list(products(name, packed, x))
        for kernel, build, product in (*ready, *reversed(ready)):
            try:
                times = timed([partial(product, x, one, None) for one in copies], check)
            except KernelError as error:
                times = {"error": str(error).replace(",", ";")[:80]}
            yield row(packed, len(x), name, kernel, build, times)


def compile_all(weights: Weights, tokens: list[int]) -> None:
    """Compile every build, in a thread per core."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for name, m in ((name, m) for m in tokens for name in weights):
            for _, packed in weights[name]:
                x = torch.empty(m, packed.shape[1], device=GPU, dtype=DTYPE)
                form = packed.spec.format
                if form != "ec_csr":
                    pool.submit(get_format(form).choose(problem_of(x, packed)).prepare, problem_of(x, packed))
                found = builds(name, packed, m)
                for build in found:
                    pool.submit(KERNELS[form].prepare, problem_of(x, packed), build)
                pool.submit(before_product, packed, x, found[-1] if found else None)


def launch_once(name: str, packed: Packed, tokens: list[int]) -> None:
    """Launch the chosen kernel and the first two builds once for each M, between profiler start and stop."""
    calls = []
    for m in tokens:
        x = torch.randn(m, packed.shape[1], device=GPU).to(DTYPE)
        calls += [partial(product, x, packed, None) for _, _, product in list(products(name, packed, x))[:3]]
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    for call in calls:
        call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def without_pdl() -> None:
    """Launch kernels without programmatic stream serialization."""
    from semisparse.runtime.kernel import LoadedKernel

    launch = LoadedKernel.__call__
    LoadedKernel.__call__ = lambda self, grid, threads, *, pdl=False, **arguments: launch(  # type: ignore[method-assign]
        self, grid, threads, **arguments
    )


def time_all(options: argparse.Namespace, weights: Weights, tokens: list[int]) -> None:
    """Time every weight, until the time is up."""
    start, rows = time.monotonic(), []
    for m in tokens:
        for name, index in ((name, index) for index in range(options.shapes) for name in weights):
            for found in measure(name, *weights[name][index], [m]):
                print(*found.values(), flush=True)
                rows.append(found)
            write_rows(options.csv, rows, COLUMNS)
            if time.monotonic() - start > options.seconds:
                print("time is up", flush=True)
                return


def main() -> None:
    """Measure, and write the CSV after each row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", type=Path)
    parser.add_argument("--tokens", default="16,32,8,64,128,256", help="comma-separated, the most important first")
    parser.add_argument("--formats", default=",".join(WEIGHTS), help=f"of {', '.join(WEIGHTS)}")
    parser.add_argument("--shapes", type=int, default=2, help=f"how many of {SHAPES}")
    parser.add_argument("--seconds", type=float, default=60, help="after which the rest is left out")
    parser.add_argument("--turn", type=Path, help="folder of turns.py")
    parser.add_argument("--once", action="store_true", help="launch once for each number of tokens, on the first shape")
    options = parser.parse_args()
    timing.GPU_SECONDS = 0.01
    start, tokens = time.monotonic(), [int(m) for m in options.tokens.split(",")]
    shapes = SHAPES[: 1 if options.once else options.shapes]
    weights = {name: [pack(name, n, k) for n, k in shapes] for name in options.formats.split(",")}
    if options.once:
        without_pdl()
        for name, ((_, packed),) in weights.items():
            launch_once(name, packed, tokens)
        return
    print(f"packed after {time.monotonic() - start:.0f} s", flush=True)
    compile_all(weights, tokens)
    print(f"compiled after {time.monotonic() - start:.0f} s", flush=True)
    with turn(options.turn):
        time_all(options, weights, tokens)


if __name__ == "__main__":
    main()
