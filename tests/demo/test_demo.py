"""The model that ships with semisparse is small and trained; the demo compares its compressed versions."""

from pathlib import Path

import pytest

from semisparse.api import demo as job
from semisparse.api import evaluate
from semisparse.cli import demo
from semisparse.demo import CALIBRATION, CHOSEN, HELD_OUT, MODEL
from tests.conftest import Run


def start_of(text: Path, folder: Path) -> Path:
    """Write the first 40,000 characters of a text: a third of the held-out text, in a third of the time."""
    path = folder / text.name
    path.write_text(text.read_text()[:40_000])
    return path


def test_the_shipped_model_is_small_and_trained(tmp_path: Path):
    assert sum(file.stat().st_size for file in MODEL.iterdir()) <= 4e6
    # A uniform guess over its 1,024 tokens has a loss of 6.93 nats; text it was trained on may have a lower loss.
    held_out, seen = (evaluate(MODEL, text=start_of(text, tmp_path))["nll"] for text in (HELD_OUT, CALIBRATION))
    assert held_out < 2.0
    assert seen < held_out < seen + 0.5


@pytest.mark.slow
@pytest.mark.xdist_group("demo")  # groups begin first: this one takes minutes
def test_the_demo_compares_recipes_with_dense(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(job, "SAMPLES", 4)  # a minute less
    monkeypatch.setattr(job, "HELD_OUT", start_of(HELD_OUT, tmp_path))
    monkeypatch.setattr(job, "LAYER", "512,512")
    found = run("demo", "--json").json
    rows = found["models"]
    by_recipe = {row["recipe"]: row for row in rows}
    dense = by_recipe.pop("dense")
    assert dense["kl"] == pytest.approx(0, abs=1e-9)
    assert len(by_recipe) == 1 + len(job.RUNS)
    chosen = by_recipe[job.TARGET]
    assert chosen["bits_per_weight"] <= 4.5
    assert chosen["kl"] == min(row["kl"] for row in by_recipe.values())
    assert chosen["bytes"] == min(row["bytes"] for row in by_recipe.values())
    assert found["layer"][0]["speedup"] == found["plan"][0]["speedup"] == 1
    assert [row["weights"] for row in found["layer"]] == [row["weights"] for row in found["plan"]]
    for row in by_recipe.values():
        assert row["bytes"] < dense["bytes"]
        assert row["bits_per_weight"] < 16
        assert 0 < row["kl"] < 2
        assert row["nll"] > dense["nll"]
        assert row["tokens_per_second"] > 0
        assert row["text"]


def test_the_chosen_model_is_the_target_s(run: Run):
    """Every tensor of the stored model is valid, and its layers take the target of 4.5 bits."""
    found = run("inspect", CHOSEN, "--verify", "--json").json
    assert 4 < found["bits_per_weight"] <= 4.5
    assert sum(file.stat().st_size for file in CHOSEN.iterdir()) < 1.5e6


@pytest.mark.parametrize(
    ("speeds", "sentence"), [((100, 90), "smaller, not faster"), ((100, 120), "smaller and faster")]
)
def test_the_demo_says_whether_it_is_faster(speeds: tuple[int, int], sentence: str, capfd: pytest.CaptureFixture[str]):
    rows = [{"tokens_per_second": speed} for speed in speeds]
    layer = [{"weights": "dense", "ms": 1.0, "speedup": speed / 100} for speed in (*speeds, speeds[1])]  # one a recipe
    demo._show_speed(rows, layer, layer)
    shown = " ".join(capfd.readouterr().err.split())
    assert sentence in shown
    assert ("measured now, not faster" in shown) == (speeds[1] < 105)
