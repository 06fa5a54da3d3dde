"""Which layers are linear is decided by what they compute; what stays dense is reported, with its reason."""

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from semisparse.compress import Recipe, dense_layers
from semisparse.compress.layers import list_decoder_layers
from semisparse.compress.staying_dense import reason_to_stay_dense
from semisparse.nn import is_linear
from tests.models import random_model

RECIPE = Recipe(pattern="2:4", prune="magnitude", ignore=("*.k_proj",))


class Named(nn.Linear):
    """A subclass that computes the same."""

    def forward(self, x):
        return super().forward(x)


class Scores(nn.Linear):
    """As Llama-4's router."""

    def forward(self, x):
        y = super().forward(x)
        return y.sigmoid(), y


class Scaled(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 1.5


class TwoArguments(nn.Linear):
    def forward(self, x, index):
        return super().forward(x)[index]


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("kind", "linear"),
    [(nn.Linear, True), (Conv1D, True), (Named, True), (Scores, False), (Scaled, False), (TwoArguments, False)],
)
def test_a_module_is_linear_if_it_computes_a_linear_layer(kind: type, linear: bool, device: str) -> None:
    with torch.device(device):
        assert is_linear(kind(12, 20)) == linear
    assert not is_linear(nn.LayerNorm(12))


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 9)  # a row for each expert
        self.shared_gate = nn.Linear(16, 1)
        self.shared = nn.Linear(16, 16)
        self.scores = Scores(16, 16)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(9))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("gate", "router of the experts"),
        ("shared_gate", "fewer than 8 rows or columns"),
        ("scores", "does not compute x @ w.T + bias"),
        ("shared", None),
        ("experts.8", None),
    ],
)
def test_routers_and_gates_stay_dense(name: str, reason: str | None) -> None:
    assert reason_to_stay_dense(Mixture(), name, RECIPE) == reason


def test_what_stays_dense_is_listed_with_its_reason_and_bytes() -> None:
    model = random_model("llama")
    compressed = {layer.full_name(name) for layer in list_decoder_layers(model, RECIPE, {}) for name in layer.patterns}
    listed = {layer.name: (layer.reason, layer.bytes) for layer in dense_layers(model, RECIPE, compressed)}
    assert listed == {
        "lm_head": ("outside the decoder layers", 259 * 24 * 2),
        "model.layers.0.self_attn.k_proj": ("ignored by the recipe", 12 * 24 * 2),
        "model.layers.1.self_attn.k_proj": ("ignored by the recipe", 12 * 24 * 2),
    }
