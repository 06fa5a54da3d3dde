"""Loss and KL divergence against a computation token by token, without batches or padding."""

import math

import pytest
import torch

from semisparse.evaluate import measure_quality
from semisparse.evaluate.perplexity import Quality
from tests.models import random_model

CHUNKS = [[5, 9, 200], list(range(30)), [7, 7], list(range(40, 64))]


@pytest.mark.parametrize("batch_tokens", [1, 64, 4096])
def test_means_over_predicted_tokens(batch_tokens: int):
    model, baseline = random_model("llama", torch.float32), random_model("qwen2", torch.float32)
    nll = kl = count = 0.0
    for chunk in CHUNKS:
        with torch.no_grad():
            logp = model(torch.tensor([chunk])).logits[0].double().log_softmax(-1)
            reference = baseline(torch.tensor([chunk])).logits[0].double().log_softmax(-1)
        for position in range(len(chunk) - 1):
            nll -= float(logp[position, chunk[position + 1]])
            kl += float((reference[position].exp() * (reference[position] - logp[position])).sum())
            count += 1
    quality = measure_quality(model, CHUNKS, baseline, batch_tokens=batch_tokens)
    assert quality.tokens == count
    # The error of log_softmax in float32 over values below 8 is a few 2^-21 per token.
    assert quality.nll == pytest.approx(nll / count, abs=1e-5)
    assert quality.kl == pytest.approx(kl / count, abs=1e-5)


def test_perplexity_that_overflows_is_infinite():
    assert Quality(1e4, 1, None).perplexity == math.inf


def test_progress_ends_at_all_chunks():
    seen = []
    measure_quality(random_model("llama"), CHUNKS, batch_tokens=32, progress=lambda *call: seen.append(call))
    assert seen[-1] == (4, 4)
