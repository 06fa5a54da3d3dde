"""A small model that proposes tokens for a larger one to verify (speculative decoding)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from semisparse.engine.backend import DecoderBackend


class DraftModel:
    """Proposes the greedy continuations of a small model, which keeps a KV cache of the texts.

    Args:
        backend: the small model.
    """

    def __init__(self, backend: DecoderBackend) -> None:
        self._backend = backend

    def begin(self, prompts: Sequence[Sequence[int]], positions: int) -> None:
        """Run the prompts of a batch.

        Args:
            prompts: token ids of each prompt.
            positions: maximum positions of a text with its proposals.
        """
        self._backend.begin(prompts, positions)

    def propose(self, texts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        """Return ``count`` proposed tokens for each text.

        Args:
            texts: prompts with the tokens accepted so far: at most ``count`` + 1 more per text than at the last call.
            count: tokens to propose.
        """
        # The last count + 1 tokens are run again, which overwrites rejected proposals in the cache.
        width = count + 1
        firsts = [max(len(text) - width, 0) for text in texts]
        rows = [[*text[first:], *[0] * width][:width] for text, first in zip(texts, firsts, strict=True)]
        argmax = self._backend.verifier(width)(torch.tensor(rows), torch.tensor(firsts, dtype=torch.int32))
        ends = torch.tensor([len(text) - 1 - first for text, first in zip(texts, firsts, strict=True)])
        token = argmax.gather(1, ends[:, None])
        positions = torch.tensor([len(text) for text in texts], dtype=torch.int32)
        proposed = [token]
        for _ in range(count - 1):
            token = self._backend.verifier(1)(token, positions)
            positions += 1
            proposed.append(token)
        return torch.cat(proposed, dim=1).tolist()
