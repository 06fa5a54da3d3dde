"""The Triton kernel of pruning to windows against the columns of torch."""

import os

import pytest
import torch

from semisparse.compress.prune import sparsegpt
from semisparse.compress.prune.factor import factorise
from semisparse.compress.prune.masks import MASK_UPDATES
from semisparse.patterns import NM

pytest.importorskip("triton", reason="triton is not installed: pip install 'semisparse[cuda]'")
from semisparse.compress.prune.sweep_triton import prune_windows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(2, 4, 24, 16), (4, 8, 16, 8)]
"""Kept, window, columns and columns per update: the last update may be a short one. Triton's interpreter is slow, and
so are torch's columns under compute-sanitizer."""
if DEVICE == "cuda" and "SEMISPARSE_DRAWS" not in os.environ:
    SHAPES += [(32, 64, 320, 128), (1, 16, 256, 128), (6, 8, 136, 128)]


@pytest.mark.parametrize(("keep", "window", "columns", "block"), SHAPES)
def test_it_prunes_as_torch_does(keep: int, window: int, columns: int, block: int, monkeypatch: pytest.MonkeyPatch):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(512, columns, generator=generator)
    x = x / x.square().mean(0).sqrt()
    upper = factorise(x.T @ x / len(x), 0.01).upper.to(DEVICE)
    weight = torch.randn(6, columns, generator=generator).to(DEVICE)
    weight[1] = 0
    weight[2] = weight[2].sign()  # of equal scores the lower column is kept
    monkeypatch.setattr(sparsegpt, "UPDATE_COLUMNS", block)
    monkeypatch.setattr(sparsegpt, "has_pruning_kernel", lambda pattern, weight: False)
    expected, kept = sparsegpt.prune_columns(weight, upper, NM(keep, window))
    found, mask = prune_windows(weight, upper, keep, window, max(1, window // MASK_UPDATES), block)
    assert torch.equal(mask, kept)
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(found != 0, expected != 0)


def test_pieces_of_a_weight_are_pruned_alike():
    """Every process's pieces get the bits that they get in a process that has all."""
    generator = torch.Generator().manual_seed(0)
    upper = torch.randn(16, 16, generator=generator).triu().add(8 * torch.eye(16)).to(DEVICE)
    weight = torch.randn(12, 16, generator=generator).to(DEVICE)
    alone, mask = prune_windows(weight, upper, 2, 4, 1, 8, [4, 4, 4])
    for rows, lengths in ((slice(0, 4), [4]), (slice(4, 12), [4, 4])):
        found, kept = prune_windows(weight[rows], upper, 2, 4, 1, 8, lengths)
        assert torch.equal(found, alone[rows])
        assert torch.equal(kept, mask[rows])
