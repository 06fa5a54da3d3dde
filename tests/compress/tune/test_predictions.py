"""The dense model's predictions, and the KL divergence from them."""

import pytest
import torch

from semisparse.compress.tune import predictions
from semisparse.compress.tune.predictions import dense_predictions
from tests.models import VOCABULARY, random_model


def batch() -> torch.Tensor:
    return torch.randint(VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(0))


def exact_kl(dense: torch.Tensor, own: torch.Tensor) -> float:
    """Return the mean KL divergence over the whole vocabulary."""
    p, q = (logits[:, :-1].double().softmax(-1) for logits in (dense, own))
    return float((p * (p / q).log()).sum(-1).mean())


@pytest.mark.parametrize("kept", [512, 5])
def test_the_divergence_is_that_of_the_vocabulary_or_of_its_likely_part(kept: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(predictions, "KEPT", kept)
    model, ids = random_model("llama"), batch()
    [found] = dense_predictions(model, [ids], torch.device("cpu"), torch.float32)
    with torch.no_grad():
        dense = model.float()(ids).logits
    own = dense + torch.randn(dense.shape, generator=torch.Generator().manual_seed(1))
    kl, exact = float(found.kl(own[:, :-1])), exact_kl(dense, own)
    assert 0 < kl <= exact * 1.01
    if kept >= VOCABULARY:
        assert kl == pytest.approx(exact, rel=1e-2)  # log-probabilities are kept in float16
        return
    p, q = (logits[:, :-1].double().softmax(-1) for logits in (dense, own))
    best = p.topk(kept, -1).indices
    coarse = [torch.cat((x.gather(-1, best), 1 - x.gather(-1, best).sum(-1, keepdim=True)), -1) for x in (p, q)]
    parts = coarse[0] * (coarse[0] / coarse[1]).log()
    assert kl == pytest.approx(float(parts.sum(-1).mean()), rel=2e-2)


def test_it_has_gradients_and_is_zero_for_the_same_predictions():
    model, ids = random_model("llama"), batch()
    [found] = dense_predictions(model, [ids], torch.device("cpu"), torch.float32)
    logits = model.float()(ids).logits[:, :-1].detach().requires_grad_()
    found.kl(logits).backward()
    assert float(found.kl(logits.detach())) == pytest.approx(0, abs=1e-3)
    assert logits.grad.abs().max() < 1e-3
