"""Where a compression puts each decoder layer that it has finished."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from semisparse.compress.distributed.ranks import Ranks
from semisparse.compress.journal import Journal
from semisparse.compress.layers import DecoderLayer
from semisparse.compress.report import LayerReport


class FinishedLayer(NamedTuple):
    """The compressed linear layers of a decoder layer.

    Args:
        weights: [N, K] in the model's dtype, on any device, by name in the decoder layer.
        reports: one for each, in the same order.
    """

    weights: Mapping[str, Tensor]
    reports: Sequence[LayerReport]


class LayerStore(Protocol):
    """Stores finished decoder layers and returns those of an interrupted run.

    `save` and `load` also put the compressed weights into the model.
    """

    def load(self, index: int, layer: DecoderLayer) -> FinishedLayer | None:
        """Return decoder layer ``index`` as an interrupted run finished it; None if it did not."""

    def save(self, index: int, layer: DecoderLayer, finished: FinishedLayer) -> None:
        """Store decoder layer ``index``."""


class OnFirstRank:
    """A store on the first rank only: the first rank saves and loads, and every rank gets what it loads.

    Args:
        store: of the first rank; those of others are not used.
        ranks: the processes.
    """

    def __init__(self, store: LayerStore, ranks: Ranks) -> None:
        self._store, self._ranks = store, ranks

    def load(self, index: int, layer: DecoderLayer) -> FinishedLayer | None:
        """Return decoder layer ``index`` as the first rank has it; None if it does not."""
        return self._ranks.first(lambda: self._store.load(index, layer))

    def save(self, index: int, layer: DecoderLayer, finished: FinishedLayer) -> None:
        """Take decoder layer ``index`` on the first rank."""
        if self._ranks.is_first:
            self._store.save(index, layer, finished)


class InPlace:
    """Writes finished weights into the model, over the dense ones.

    Args:
        journal: stores them, and provides those of an interrupted run.
    """

    def __init__(self, journal: Journal | None = None) -> None:
        self._journal = journal

    def load(self, index: int, layer: DecoderLayer) -> FinishedLayer | None:
        """Return decoder layer ``index`` from the journal; None if it is not there."""
        saved = self._journal.load_layer(index) if self._journal else None
        if saved is None:
            return None
        finished = FinishedLayer(*saved)
        self._write(layer, finished)
        return finished

    def save(self, index: int, layer: DecoderLayer, finished: FinishedLayer) -> None:
        """Write decoder layer ``index`` into the model and the journal."""
        self._write(layer, finished)
        if self._journal:
            self._journal.save_layer(index, finished.weights, finished.reports)

    def _write(self, layer: DecoderLayer, finished: FinishedLayer) -> None:
        for name, weight in finished.weights.items():
            layer.weight(name).copy_(weight)
