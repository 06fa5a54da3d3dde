"""The model that ships with semisparse is small and trained; the demo compares its compressed versions."""

from pathlib import Path

import pytest

from semisparse.api import evaluate
from semisparse.cli import demo
from semisparse.demo import CALIBRATION, HELD_OUT, MODEL
from tests.conftest import Run


def start_of(text: Path, folder: Path) -> Path:
    """Write the first 40,000 characters of a text: a third of the held-out text, in a third of the time."""
    path = folder / text.name
    path.write_text(text.read_text()[:40_000])
    return path


def test_the_shipped_model_is_small_and_trained(tmp_path: Path):
    assert sum(file.stat().st_size for file in MODEL.iterdir()) <= 4e6
    # A uniform guess over its 1,024 tokens loses 6.93 nats; text it was trained on may be a little easier.
    held_out, seen = (evaluate(MODEL, text=start_of(text, tmp_path))["nll"] for text in (HELD_OUT, CALIBRATION))
    assert held_out < 2.0
    assert seen < held_out < seen + 0.5


@pytest.mark.slow
def test_the_demo_compares_recipes_with_dense(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(demo, "SAMPLES", 4)  # with two runs for five, a minute less
    monkeypatch.setattr(demo, "HELD_OUT", start_of(HELD_OUT, tmp_path))
    monkeypatch.setattr(demo, "RUNS", demo.RUNS[:2])
    rows = run("demo", "--json").json["models"]
    by_recipe = {row["recipe"]: row for row in rows}
    dense = by_recipe.pop("dense")
    assert dense["kl"] == pytest.approx(0, abs=1e-9)
    assert len(by_recipe) == 2
    for row in by_recipe.values():
        assert row["bytes"] < dense["bytes"]
        assert row["bits_per_weight"] < 16
        assert 0 < row["kl"] < 2
        assert row["perplexity"] > dense["perplexity"]
        assert row["tokens_per_second"] > 0
        assert row["text"]
