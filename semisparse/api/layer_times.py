"""How long a GPU computes for one decoder layer while it is compressed, from the operations of its matmuls."""

from __future__ import annotations

from semisparse.bench.machines import Machine
from semisparse.compress.layers import DecoderLayer

PRODUCTS = 15
"""Matmuls [N, K] x [K, K] while a linear layer is pruned: 11 of conjugate gradients, 4 of goals and errors."""

THREE_PASS = 0.8 / 3
"""Float32 matmuls in three bfloat16 products, of the rate of one large bfloat16 product. An H200 reaches 210 of 770."""

FACTOR = 0.43
"""The rate of an inverse factor, K^3 operations, of that of float32 matmuls: 58.6 ms for K = 11,008 on an H200."""

COLUMN_SECONDS = 4.2e-6
"""Pruning one column of a linear layer, of any number of rows."""

REST = 1.3
"""What norms, rotary embeddings, activations and splitting into halves add, as a factor."""

LAYER_BANDWIDTH = 2e9
"""Bytes per second at which a decoder layer is read, copied to the GPU, traced and taken by the thread that packs."""

TRAINED_BYTES = 240
"""Memory traffic of a training step per weight, beside the matmuls: rounding, splitting into halves, gradients, AdamW.
What is left of 29 ms per step of a decoder layer of llama2-7b (results/h200/bits3-marks.csv) after 18 of matmuls."""


class LayerTimes:
    """Seconds of the parts of one decoder layer's compression, on each of some GPUs.

    Args:
        layer: the decoder layer, with the linear layers to compress.
        tokens: of the calibration text, or those that are taken of it.
        length: of a sequence.
        machine: the GPU.
        count: the GPUs.
    """

    def __init__(self, layer: DecoderLayer, tokens: int, length: int, machine: Machine, count: int) -> None:
        self.shapes = {name: (len(layer.weight(name)), layer.weight(name).shape[1]) for name in layer.patterns}
        self.weights = sum(n * k for n, k in self.shapes.values())
        self._features = min(k for _, k in self.shapes.values())
        self._tokens, self._length, self._count = tokens, length, count
        self._bytes = sum(parameter.nbytes for parameter in layer.module.parameters())
        self._float32, self._bandwidth = machine.peaks["fp32"], machine.bandwidth
        self._three_pass = THREE_PASS * machine.peaks["tensor fp16"]

    def forwards(self, linears: float, attention: float, tokens: int | None = None) -> float:
        """Return the seconds of so many forwards of its linear layers and of its attention."""
        tokens = self._tokens if tokens is None else tokens
        # Each token attends to half of its sequence on average, by two products.
        products = 4 * tokens * min(self._length, tokens) / 2 * self._features
        seconds = linears * 2 * tokens * self.weights / self._three_pass + attention * products / self._float32
        return REST * seconds / self._count

    def sums(self, models: int) -> float:
        """Return the seconds of the Hessians, and with two models of the sums that compare them."""
        # Linear layers of one module that have as many inputs read the same ones.
        inputs = {(name.rpartition(".")[0], k): k for name, (_, k) in self.shapes.items()}
        sums = models * sum(k * k for k in inputs.values())
        if models == 2:
            sums += sum(n * k for n, k in self.shapes.values() if n == self._features < k)  # r x^T
        return REST * 2 * self._tokens * sums / self._three_pass / self._count

    def pruning(self, levels: int = 1) -> float:
        """Return the seconds of pruning its linear layers to so many n:m patterns."""
        products = levels * 2 * PRODUCTS * sum(n * k * k for n, k in self.shapes.values()) / self._three_pass
        columns = levels * COLUMN_SECONDS * sum(k for _, k in self.shapes.values())
        factors = 2 * sum(k**3 for _, k in self.shapes.values()) / (FACTOR * self._float32)
        return REST * (products + columns + factors) / self._count

    def copying(self) -> float:
        """Return the seconds of reading, copying and tracing it, and of handing it to the thread that packs."""
        return self._bytes / LAYER_BANDWIDTH

    def training_step(self, tokens: int) -> float:
        """Return the seconds of one training step of its weights, on one GPU."""
        matmuls = self.forwards(3, 3, tokens) * self._count  # the gradients of inputs and weights take one forward each
        return matmuls + TRAINED_BYTES * self.weights / self._bandwidth
