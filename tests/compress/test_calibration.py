"""Drawing calibration sequences, and refusing those that the model cannot run."""

import pytest
import torch

from semisparse.compress import calibration, calibration_batches
from semisparse.compress.calibration import BATCH_TOKENS, calibration_tokens, check_batches, warn_if_fewer
from semisparse.errors import InputError
from tests.models import VOCABULARY, byte_tokenizer, random_model

TEXTS = [f"document {i} " * (i % 5 + 1) for i in range(40)]


def rows(batches: list[torch.Tensor]) -> list[tuple[int, ...]]:
    return sorted(tuple(row) for batch in batches for row in batch.tolist())


def draw(samples: int | None, seed: int = 0) -> list[torch.Tensor]:
    return calibration_batches(byte_tokenizer(), TEXTS, samples=samples, seqlen=20, seed=seed)


@pytest.mark.parametrize("seed", range(4))
def test_batches_hold_sequences_of_one_length_the_longest_first(seed: int):
    lengths = [batch.shape[1] for batch in draw(20, seed)]
    assert len(lengths) > 2
    assert lengths == sorted(set(lengths), reverse=True)


def test_samples_are_drawn_by_seed():
    batches = draw(30)
    assert sum(len(batch) for batch in batches) == 30
    assert all(batch.dtype == torch.int64 and batch.shape[1] <= 20 for batch in batches)
    assert rows(batches) == rows(draw(30))
    assert rows(batches) != rows(draw(30, seed=1))
    every = rows(draw(10_000))
    assert set(rows(batches)) <= set(every)
    assert sum(row[0] == 256 for row in every) == len(TEXTS), "each document starts with BOS"


def test_a_batch_is_bounded():
    tokenizer = byte_tokenizer()
    length = BATCH_TOKENS["cpu"] // 3
    batches = calibration_batches(tokenizer, ["x" * (8 * length)], samples=7, seqlen=length, seed=0)
    assert [len(batch) for batch in batches] == [3, 3, 1]


def test_by_default_the_samples_hold_a_given_number_of_tokens():
    def drawn(tokens: int) -> list[tuple[int, ...]]:
        return rows(calibration_batches(byte_tokenizer(), TEXTS, samples=None, seqlen=20, seed=0, tokens=tokens))

    everything = sum(len(row) for row in rows(draw(10_000)))
    assert 200 <= sum(map(len, drawn(200))) < 220, "at most one sequence more"
    assert sum(map(len, drawn(everything))) == sum(map(len, drawn(everything + 1))) == everything
    assert set(drawn(200)) <= set(rows(draw(10_000)))


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_tokens_by_default_follow_the_widest_linear_layer(architecture: str, monkeypatch: pytest.MonkeyPatch):
    """gpt2 stores its weights [K, N]."""
    model = random_model(architecture)
    widest = model.config.intermediate_size if architecture == "llama" else 4 * model.config.n_embd
    assert calibration_tokens(model) == 256 * widest
    monkeypatch.setattr(calibration, "CALIBRATION_TOKENS", 1000)
    assert calibration_tokens(model) == 1000


def test_no_samples_is_refused():
    with pytest.raises(InputError, match="at least 1 sample"):
        draw(0)


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([], "needs calibration text"),
        ([torch.zeros(1, 65, dtype=torch.int64)], "65 tokens exceed the model's context of 64"),
        ([torch.full((1, 4), VOCABULARY)], f"token {VOCABULARY} is not in the model's vocabulary"),
    ],
)
def test_batches_that_cannot_run_are_refused(batches: list[torch.Tensor], message: str):
    with pytest.raises(InputError, match=message):
        check_batches(random_model("llama"), batches)


def test_fewer_sequences_than_asked_for_are_announced(recwarn: pytest.WarningsRecorder):
    held = sum(len(batch) for batch in draw(None))
    warn_if_fewer(draw(held), held)
    warn_if_fewer(draw(None), None)
    assert not recwarn.list
    with pytest.warns(UserWarning, match=f"{held + 1} calibration samples .* the text holds {held} "):
        warn_if_fewer(draw(held + 1), held + 1)
