"""A small model that proposes tokens for a larger one to verify (speculative decoding)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from semisparse.engine.backend import DecoderBackend


class DraftModel:
    """Proposes the greedy continuation of a small model, whose KV cache follows the texts.

    Args:
        backend: the small model.
    """

    def __init__(self, backend: DecoderBackend) -> None:
        self._backend = backend

    def begin(self, prompts: Sequence[Sequence[int]], positions: int) -> None:
        """Take the prompts of a batch.

        Args:
            prompts: tokens of each.
            positions: that texts and proposals take at most.
        """
        self._backend.begin(prompts, positions)

    def propose(self, texts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        """Return ``count`` tokens for each text.

        Args:
            texts: prompts and what followed, each at most ``count`` + 1 tokens longer than at the last call: so many
                are accepted at once.
            count: tokens to propose.
        """
        # What the cache holds of rejected proposals is overwritten: the last count + 1 tokens are taken again.
        width = count + 1
        firsts = [max(len(text) - width, 0) for text in texts]
        rows = [[*text[first:], *[0] * width][:width] for text, first in zip(texts, firsts, strict=True)]
        argmax = self._backend.verifier(width)(torch.tensor(rows), torch.tensor(firsts, dtype=torch.int32))
        ends = torch.tensor([len(text) - 1 - first for text, first in zip(texts, firsts, strict=True)])
        token = argmax.gather(1, ends[:, None])
        places = torch.tensor([len(text) for text in texts], dtype=torch.int32)
        found = [token]
        for _ in range(count - 1):
            token = self._backend.verifier(1)(token, places)
            places += 1
            found.append(token)
        return torch.cat(found, dim=1).tolist()
