"""How the next token is chosen: the most probable one, or drawn at random."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from semisparse.errors import InputError


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn.

    Args:
        temperature: logits are divided by it; 0 takes the most probable token.
        top_k: draw only from this many most probable tokens; 0 for all.
        top_p: draw only from the fewest most probable tokens whose probabilities sum to at least this.
        seed: seed of the random numbers.
    Raises:
        InputError: a number is out of its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise InputError(f"temperature is {self.temperature}; it is 0 (greedy) or a finite number above")
        if self.top_k < 0:
            raise InputError(f"top-k is {self.top_k}; it is 0 (all tokens) or a number of tokens")
        if not 0 < self.top_p <= 1:
            raise InputError(f"top-p is {self.top_p}; it is above 0, 1 at most")
        if not -(1 << 63) <= self.seed < 1 << 64:
            raise InputError(f"seed is {self.seed}; it is a number of 64 bits")
        if self.greedy and (self.top_k or self.top_p < 1):
            raise InputError("top-k and top-p need a temperature above 0")

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is taken."""
        return self.temperature == 0


def choose(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> Tensor:
    """Choose each sequence's next token, without waiting for the device.

    Tokens are drawn by the Gumbel-max trick: the argmax of logits plus Gumbel noise.

    Args:
        logits: [sequences, vocabulary].
        sampling: how tokens are chosen.
        generator: random numbers on the logits' device.
    Returns:
        [sequences] int64.
    """
    if sampling.greedy:
        return logits.argmax(-1)
    scaled = logits.float() / sampling.temperature
    if sampling.top_k:
        least = scaled.topk(min(sampling.top_k, scaled.shape[-1]), dim=-1).values[:, -1:]
        scaled = scaled.masked_fill(scaled < least, -torch.inf)
    if sampling.top_p < 1:
        ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
        probabilities = ordered.softmax(-1)
        beyond = probabilities.cumsum(-1) - probabilities >= sampling.top_p  # the most probable one always stays
        scaled = scaled.masked_fill(torch.zeros_like(beyond).scatter_(-1, order, beyond), -torch.inf)
    noise = torch.empty_like(scaled).exponential_(generator=generator)
    return (scaled - noise.log()).argmax(-1)
