"""The heat map is plotted; linear layers outside decoder layers are refused."""

from pathlib import Path

import pytest

from semisparse.bench.plot_densities import plot_densities
from semisparse.errors import SemisparseError


def test_a_heat_map_is_plotted(tmp_path: Path):
    pytest.importorskip("matplotlib")
    densities = {f"model.layers.{layer}.mlp.{name}": 0.5 for layer in (0, 1, 10) for name in ("up_proj", "down_proj")}
    plot_densities(densities, tmp_path / "plots" / "all.png", "densities")
    assert (tmp_path / "plots" / "all.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SemisparseError, match="lm_head has no decoder layer's number in its name"):
        plot_densities({"lm_head": 0.5}, tmp_path / "no.png", "densities")
