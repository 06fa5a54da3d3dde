"""The state of decoding: KV cache, current tokens and positions, output."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from semisparse.engine.decoder import Cache, Decoder


@dataclass
class State:
    """What a decode step reads and writes, on the device.

    Args:
        cache: keys and values.
        tokens: [sequences] int64, the next step's input tokens.
        positions: [sequences] int32, their positions.
        output: [capacity, sequences] int64, the tokens chosen so far.
        steps: [2] int32. The first is the number of rows of ``output`` that are written, the second a counter of
            greedy.cu, 0 between steps.
    """

    cache: Cache
    tokens: Tensor
    positions: Tensor
    output: Tensor
    steps: Tensor

    @staticmethod
    def make(decoder: Decoder, sequences: int, length: int) -> State:
        """Allocate a state for ``sequences`` sequences of ``length`` positions each."""
        device = decoder.device
        return State(
            Cache.make(decoder, sequences, length),
            torch.zeros(sequences, dtype=torch.int64, device=device),
            torch.zeros(sequences, dtype=torch.int32, device=device),
            torch.zeros(length, sequences, dtype=torch.int64, device=device),
            torch.zeros(2, dtype=torch.int32, device=device),
        )
