"""Each instruction does what the PTX ISA says: the emulator's stand-in everywhere, the GPU's own where there is one."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from semisparse.runtime.kernel import CudaSource
from tests.cuda_emulator import EmulatedKernel, adverse, needs_compiler

SOURCE = CudaSource(Path(__file__).parent / "kernels" / "instructions.cu")

pytestmark = pytest.mark.slow

RUNS = [
    pytest.param("early", marks=needs_compiler),
    pytest.param("late", marks=needs_compiler),
    pytest.param("gpu", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")),
]


@pytest.fixture(params=RUNS)
def run(request: pytest.FixtureRequest):
    """Run a kernel on arrays, in place; those that were written come back changed."""
    where = request.param

    def launch(name: str, arrays: dict[str, Tensor], threads=32, ctas=1, shared=0, defines=None, **numbers) -> None:
        build = SOURCE.build(f"instruction_{name}", defines or {}, shared)
        if where != "gpu":
            adverse[0] = where == "late"
            EmulatedKernel(build)((ctas, 1, 1), threads, **arrays, **numbers)
            return
        if name.startswith("wgmma") and torch.cuda.get_device_capability() != (9, 0):
            pytest.skip("wgmma is Hopper's")
        there = {key: value.cuda() for key, value in arrays.items()}
        build.load(torch.device("cuda"))((ctas, 1, 1), threads, **there, **numbers)
        for key, value in arrays.items():
            value.copy_(there[key])

    yield launch
    adverse[0] = False


def random_words(*shape: int) -> Tensor:
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int64).to(torch.int32)


def fragment_a(matrix: Tensor) -> Tensor:
    """[16, columns] to [32 lanes, words]: rows g and g + 8, then the other half of the columns (PTX: mma.m16n8k16)."""
    per_word = 4 // matrix.element_size()
    columns = matrix.shape[1]
    lanes = []
    for lane in range(32):
        g, t = divmod(lane, 4)
        for half in (0, columns // 2):
            for row in (g, g + 8):
                lanes.append(matrix[row, half + per_word * t : half + per_word * (t + 1)])
    return torch.stack(lanes).contiguous().view(torch.int32).view(32, 4)


def fragment_b(matrix: Tensor) -> Tensor:
    """[rows of K, 8] to [32 lanes, 2 words]."""
    return fragment_a(torch.cat([matrix.T, matrix.T]))[:, ::2].contiguous()


def fragment_d(matrix: Tensor) -> Tensor:
    """[16, columns] to [32 lanes, columns / 2]: of each eight columns 2 t and 2 t + 1 of row g, then of row g + 8."""
    n = matrix.shape[1]
    d = torch.empty(32, n // 2, dtype=matrix.dtype)
    for lane in range(32):
        g, t = divmod(lane, 4)
        for i in range(n // 2):
            d[lane, i] = matrix[g + 8 * (i // 2 % 2), i // 4 * 8 + 2 * t + i % 2]
    return d


def fragments_of_64_rows(matrix: Tensor, fragment) -> Tensor:
    return torch.cat([fragment(rows) for rows in matrix.split(16)])


@pytest.mark.parametrize(("dtype", "element"), [(torch.float16, "__half"), (torch.bfloat16, "__nv_bfloat16")])
def test_mma(run, dtype, element):
    a, b, d = torch.randn(16, 16).to(dtype), torch.randn(16, 8).to(dtype), torch.randn(16, 8)
    found = fragment_d(d)
    run("mma", {"a": fragment_a(a), "b": fragment_b(b), "d": found}, defines={"ELEMENT": element})
    torch.testing.assert_close(found, fragment_d(d + a.float() @ b.float()), rtol=1e-5, atol=1e-5)


def test_mma_of_8_bits(run):
    a = torch.randint(0, 256, (16, 32), dtype=torch.uint8)
    b = torch.randint(-128, 128, (32, 8), dtype=torch.int8)
    d = torch.randint(-99, 99, (16, 8), dtype=torch.int32)
    found = fragment_d(d)
    run("mma_8_bits", {"a": fragment_a(a), "b": fragment_b(b), "d": found})
    assert torch.equal(found, fragment_d(d + a.int() @ b.int()))


def test_ldmatrix_and_stmatrix(run):
    matrices = torch.randint(-(2**15), 2**15, (4, 8, 8), dtype=torch.int16)
    found, back = torch.zeros(32, 4, dtype=torch.int32), torch.zeros_like(matrices)
    run("ldmatrix", {"from": matrices, "to": found, "back": back}, shared=1024)
    words = matrices.transpose(1, 2).contiguous().view(torch.int32)  # [4, 8, 4], lane = row * 4 + word
    assert torch.equal(found, words.flatten(1).T)
    assert torch.equal(back, matrices)


def test_movmatrix(run):
    matrix = torch.randint(-(2**15), 2**15, (8, 8), dtype=torch.int16)
    found = torch.zeros(32, dtype=torch.int32)
    run("movmatrix", {"from": matrix.view(torch.int32), "to": found})
    assert torch.equal(found.view(8, 4), matrix.T.contiguous().view(torch.int32))


def test_integers(run):
    a, b, c = random_words(32), random_words(32), random_words(32)
    found = torch.zeros(32, 6, dtype=torch.int32)
    run("integers", {"a": a, "b": b, "c": c, "to": found})
    for low, high, selector, row in zip(*(t.tolist() for t in (a, b, c, found)), strict=True):
        low, high, selector = (value & 0xFFFFFFFF for value in (low, high, selector))
        octets = [(low | high << 32) >> 8 * i & 255 for i in range(8)]
        nibbles = [selector >> 4 * i & 15 for i in range(4)]
        signs = [255 if octets[n & 7] & 128 else 0 for n in nibbles]
        expected = [
            sum((signs[i] if n & 8 else octets[n & 7]) << 8 * i for i, n in enumerate(nibbles)),
            sum(octets[n & 7] << 8 * i for i, n in enumerate(nibbles)),
            ((low | high << 32) << (selector & 31)) >> 32,
            (low | high << 32) >> (selector & 31),
            sum((low >> s & 255) * (high >> s & 255) for s in (0, 8, 16, 24)) + selector,
            low * high + selector,
        ]
        assert [value & 0xFFFFFFFF for value in row] == [value & 0xFFFFFFFF for value in expected]


def test_cvt_to_fp8(run):
    values = torch.cat([torch.randn(40) * 100, torch.randn(20) / 300, torch.tensor([0.0, -0.0, 500.0, -1e9])])
    found = torch.zeros(32, dtype=torch.int16)
    run("cvt", {"from": values, "to": found})
    assert torch.equal(found.view(torch.uint8), values.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8))


def test_cp_async(run):
    words = random_words(32, 4)
    found = torch.zeros(32, 8, dtype=torch.int32)
    run("cp_async", {"from": words, "to": found}, shared=1024)
    read = torch.arange(4) < torch.arange(32)[:, None] % 5
    assert torch.equal(found[:, :4], words * read)
    assert torch.equal(found[:, 4:7], words[:, :3])
    assert (found[:, 7] == 7).all()


@pytest.mark.parametrize("cluster", [1, 2])
def test_bulk_copies_and_mbarriers(run, cluster):
    words = random_words(4, 64)
    found = torch.zeros(4, cluster * 64, dtype=torch.int32)
    run("bulk", {"from": words, "to": found}, ctas=4, shared=cluster * 256 + 16, defines={"CLUSTER": cluster})
    assert torch.equal(found, words.view(-1, cluster * 64).repeat_interleave(cluster, dim=0))


def test_ctas_that_wait_for_one_another(run):
    found = torch.zeros(1, dtype=torch.int32)
    run("order", {"counter": torch.zeros(1, dtype=torch.int32), "to": found}, ctas=4)
    assert found.item() == 3210


@pytest.mark.parametrize(("dtype", "element"), [(torch.float16, "__half"), (torch.bfloat16, "__nv_bfloat16")])
@pytest.mark.parametrize(("columns", "step", "scale"), [(32, 0, 1), (256, 3, 0)])
def test_wgmma(run, dtype, element, columns, step, scale):
    a, b, d = torch.randn(64, 16).to(dtype), torch.randn(columns, 64).to(dtype), torch.randn(64, columns)
    found = fragments_of_64_rows(d, fragment_d)
    arrays = {"a": fragments_of_64_rows(a, fragment_a), "b": b, "d": found}
    defines = {"ELEMENT": element, "COLUMNS": columns}
    run("wgmma", arrays, 128, shared=columns * 128, defines=defines, step=step, scale=scale)
    exact = scale * d + a.float() @ b[:, 16 * step : 16 * step + 16].float().T
    torch.testing.assert_close(found, fragments_of_64_rows(exact, fragment_d), rtol=1e-4, atol=1e-4)


def sparse_rows(rows: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw two positions of each four columns: [rows, columns / 2], increasing, and the columns that they are."""
    rng = np.random.default_rng(rows + columns)
    pairs = np.sort(np.array([rng.permutation(4)[:2] for _ in range(rows * columns // 4)]), axis=1)
    positions = pairs.reshape(rows, columns // 2)
    return positions, positions + np.arange(columns // 2) // 2 * 4


def metadata_of_16_bits(positions: np.ndarray, selector: int) -> Tensor:
    """Of [64, 16] positions: lanes 2 * selector and the next of a quad have eight of row g low, of row g + 8 high."""
    words = np.random.default_rng(0).integers(0, 2**32, 128, dtype=np.uint64)  # the other lanes' words must not matter
    for warp in range(4):
        for g in range(8):
            for pair in (0, 1):
                word = 0
                for half in (0, 1):
                    row = positions[16 * warp + g + 8 * half, 8 * pair : 8 * pair + 8]
                    word |= sum(int(p) << 2 * i for i, p in enumerate(row)) << 16 * half
                words[32 * warp + 4 * g + 2 * selector + pair] = word
    return torch.from_numpy(words.astype(np.uint32).view(np.int32).copy())


def metadata_of_8_bits(positions: np.ndarray) -> Tensor:
    """Of [64, 32] positions: lane t of a quad has 16, from 16 * (t // 2) on, of row g + 8 * (t % 2)."""
    words = np.zeros(128, dtype=np.uint64)
    for warp in range(4):
        for lane in range(32):
            g, t = divmod(lane, 4)
            row = positions[16 * warp + g + 8 * (t % 2), 16 * (t // 2) : 16 * (t // 2) + 16]
            words[32 * warp + lane] = sum(int(p) << 2 * i for i, p in enumerate(row))
    return torch.from_numpy(words.astype(np.uint32).view(np.int32).copy())


def expanded(kept: Tensor, columns: np.ndarray, width: int) -> Tensor:
    dense = torch.zeros(kept.shape[0], width, dtype=torch.float64)
    return dense.scatter_(1, torch.from_numpy(columns), kept.double())


def test_sparse_wgmma_from_registers(run):
    positions, columns = sparse_rows(64, 32)
    a, b, d = torch.randn(64, 16).half(), torch.randn(32, 128).half(), torch.randn(64, 128)
    found = fragments_of_64_rows(d, fragment_d)
    arrays = {
        "a": fragments_of_64_rows(a, fragment_a),
        "metadata": metadata_of_16_bits(positions, 0),
        "b": b,
        "d": found,
    }
    run("wgmma_sparse_registers", arrays, 128, shared=32 * 256)
    exact = (d.double() + expanded(a, columns, 32) @ b.double()).float()
    torch.testing.assert_close(found, fragments_of_64_rows(exact, fragment_d), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("dtype", "element", "selector"),
    [(torch.int8, "Int8", 0), (torch.float8_e4m3fn, "Fp8", 0), (torch.bfloat16, "__nv_bfloat16", 1)],
)
def test_sparse_wgmma_from_shared_memory(run, dtype, element, selector):
    size, columns = dtype.itemsize, 64
    positions, places = sparse_rows(64, 64 // size)
    values = torch.randint(-9, 9, (64, 32 // size)), torch.randint(-9, 9, (columns, 128 // size))
    a, b = (v.float().to(dtype) for v in values)
    whole = dtype == torch.int8
    found = torch.zeros(128, columns // 2, dtype=torch.int32 if whole else torch.float32)
    metadata = metadata_of_8_bits(positions) if size == 1 else metadata_of_16_bits(positions, selector)
    defines = {
        "SPARSE_ELEMENT": element,
        "ACCUMULATOR": "int" if whole else "float",
        "SELECTOR": selector,
        "COLUMNS": columns,
    }
    arrays = {"a": a.view(torch.uint8), "metadata": metadata, "b": b.view(torch.uint8), "d": found}
    run("wgmma_sparse", arrays, 128, shared=columns * 128 + 2048, defines=defines)
    exact = expanded(a.float(), places, 64 // size) @ b[:, : 64 // size].double().T
    assert torch.equal(found, fragments_of_64_rows(exact, fragment_d).to(found.dtype))
