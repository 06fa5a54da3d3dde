"""The heat map is drawn, and layers outside blocks are refused."""

from pathlib import Path

import pytest

from semisparse.compress.search.plot import plot_densities
from semisparse.errors import SemisparseError


def test_a_heat_map_is_drawn(tmp_path: Path):
    pytest.importorskip("matplotlib")
    densities = {f"model.layers.{block}.mlp.{name}": 0.5 for block in (0, 1, 10) for name in ("up_proj", "down_proj")}
    plot_densities(densities, tmp_path / "plots" / "all.png", "densities")
    assert (tmp_path / "plots" / "all.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SemisparseError, match="lm_head has no number of a block"):
        plot_densities({"lm_head": 0.5}, tmp_path / "no.png", "densities")
