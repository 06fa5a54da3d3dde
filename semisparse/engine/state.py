"""What decode steps read and write."""

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
        tokens: [sequences] int64, the tokens to take next.
        positions: [sequences] int32, their places.
        output: [capacity, sequences] int64, the tokens chosen so far.
        steps: [2] int32, how many rows of it are written; then a 0.
    """

    cache: Cache
    tokens: Tensor
    positions: Tensor
    output: Tensor
    steps: Tensor

    @staticmethod
    def make(decoder: Decoder, sequences: int, length: int) -> State:
        """Allocate a state for so many sequences of so many positions."""
        device = decoder.device
        return State(
            Cache(decoder.structure, sequences, length, device, decoder.dtype),
            torch.zeros(sequences, dtype=torch.int64, device=device),
            torch.zeros(sequences, dtype=torch.int32, device=device),
            torch.zeros(length, sequences, dtype=torch.int64, device=device),
            torch.zeros(2, dtype=torch.int32, device=device),
        )
