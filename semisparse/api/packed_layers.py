"""Packing each decoder layer as soon as it is finished, so that no more than one is held unpacked."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from semisparse.api.packing import pack_for_disk
from semisparse.api.recipe import pack_options
from semisparse.api.takeover import Kept, pack_kept
from semisparse.checkpoint import DIGESTS
from semisparse.compress import Choice, FinishedLayer, Journal, LayerReport, Recipe
from semisparse.compress.journal import report_from_json, report_to_json
from semisparse.compress.layers import DecoderLayer
from semisparse.formats import Packed
from semisparse.formats.base import WeightSpec
from semisparse.nn import replace_linear

PART = "block"
"""The part of the journal that holds the packed layers of a decoder layer."""

EXACT = "exact"
"""Name, in the journal, of the tensor with a weight that its packed layer does not store exactly."""


class PackedLayers(AbstractContextManager["PackedLayers"]):
    """A `LayerStore` that replaces dense layers of the model by packed ones.

    One thread writes a decoder layer to the journal while the next one is compressed, and on a GPU packs it.

    Args:
        model: whose layers are replaced.
        plan: how they are compressed.
        choices: by module name, of layers that are not compressed as the recipe says.
        kept: by module name, of layers that keep the quantised values that another tool gave them.
        journal: stores finished decoder layers, and provides those of an interrupted run.
        mapped: whether the model is to read packed layers from the journal's files, and not to hold them in memory.
        part: the part of the journal that has the decoder layers.
        held_back: whether the model's layers stay dense until `put_into_model` is called.

    Attributes:
        entries: of the replaced layers in the ``quantization_config`` block, by module name.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        plan: Recipe,
        choices: Mapping[str, Choice],
        kept: Mapping[str, Kept],
        journal: Journal | None,
        mapped: bool,
        part: str = PART,
        held_back: bool = False,
    ) -> None:
        self._part, self._held_back = part, held_back
        self._held: list[tuple[DecoderLayer, Mapping[str, Packed], list[dict[str, Any]]]] = []
        self._model, self._plan, self._choices, self._kept = model, plan, choices, kept
        self._journal, self._mapped = journal, mapped
        self._writer, self._writing = ThreadPoolExecutor(1), Future[None]()
        self._writing.set_result(None)
        self._stream: torch.cuda.Stream | None = None
        self.entries: dict[str, dict[str, Any]] = {}

    def __exit__(self, *exception: object) -> None:
        """Wait until the last decoder layer is written."""
        self._writer.shutdown()
        if exception[0] is None:
            self._writing.result()

    def load(self, index: int, layer: DecoderLayer) -> FinishedLayer | None:
        """Return decoder layer ``index`` from the journal, unpacked; None if it is not there."""
        piece = self._journal.load(self._part, index) if self._journal else None
        if piece is None:
            return None
        packed, exact, notes = _read(*piece)
        self._replace(layer, packed, notes)
        weights = {name: exact[name] if name in exact else packed[name].unpack() for name in packed}
        return FinishedLayer(weights, [report_from_json(note["report"], {}, "") for note in notes])

    def save(self, index: int, layer: DecoderLayer, finished: FinishedLayer) -> None:
        """Pack decoder layer ``index``, write it to the journal and put it into the model.

        Weights on a GPU are packed by the thread that writes, on a stream of its own, while the next decoder layer is
        compressed. On a CPU two threads would only share the cores.
        """
        self._writing.result()
        on_gpu = [weight for weight in finished.weights.values() if weight.is_cuda]
        if not on_gpu:
            self._writing = self._writer.submit(self._finish, index, layer, *self._pack_all(finished))
            return
        device = on_gpu[0].device
        self._stream = self._stream or torch.cuda.Stream(device)  # one: each has memory of its own
        self._stream.wait_stream(torch.cuda.current_stream(device))
        self._writing = self._writer.submit(self._pack_beside, self._stream, index, layer, finished)

    @torch.no_grad()
    def _pack_beside(self, stream: torch.cuda.Stream, index: int, layer: DecoderLayer, finished: FinishedLayer) -> None:
        """Pack and write a decoder layer on a stream."""
        with torch.cuda.stream(stream):
            try:
                self._finish(index, layer, *self._pack_all(finished))
            finally:
                stream.synchronize()  # then the weights' memory may be used again

    def _pack_all(self, finished: FinishedLayer) -> tuple[dict[str, Packed], dict[str, Tensor], list[dict[str, Any]]]:
        """Return the packed layers of a decoder layer, the weights they do not store exactly, and notes on each."""
        packed, exact, notes = dict[str, Packed](), dict[str, Tensor](), list[dict[str, Any]]()
        for (name, weight), report in zip(finished.weights.items(), finished.reports, strict=True):
            one, outcome = self._pack(report, weight)
            # int8 and fp8 are rounded by packing. Later layers are compressed for the weight before that rounding.
            if self._journal and not torch.equal(one.unpack().to(weight.device), weight):
                exact[name] = weight.cpu()
            packed[name] = one
            measured = {"density": report.density, "error": report.error, "outcome": outcome}
            entry = one.spec.to_dict() | measured
            notes.append({"name": name, "entry": entry, "report": report_to_json(replace(report, scales=None), {}, "")})
        return packed, exact, notes

    def _pack(self, report: LayerReport, weight: Tensor) -> tuple[Packed, str]:
        """Return a layer in the layout on disk, and what was done to it."""
        if report.name in self._kept:
            own = self._kept[report.name]
            return pack_kept(report.name, own, weight.cpu(), self._plan), f"kept {own.choice.label}"
        choice = self._choices.get(report.name, Choice(report.pattern, self._plan.quant, self._plan.format))
        options = pack_options(self._plan, choice.quant)
        options |= {"scales": report.scales.to(weight.device)} if report.scales else {}
        return pack_for_disk(weight, choice.format, report.pattern, **options), report.outcome

    def _finish(
        self,
        index: int,
        layer: DecoderLayer,
        packed: Mapping[str, Packed],
        exact: Mapping[str, Tensor],
        notes: list[dict[str, Any]],
    ) -> None:
        """Write a decoder layer to the journal, and put it into the model."""
        if self._journal:
            self._journal.save(self._part, index, _tensors(packed, exact), notes)
        if self._journal and self._mapped:
            packed, _, notes = _read(*self._journal.written(self._part, index))
        self._replace(layer, packed, notes)

    def put_into_model(self) -> None:
        """Replace the layers that were held back."""
        self._held_back = False
        for layer, packed, notes in self._held:
            self._replace(layer, packed, notes)
        self._held.clear()

    def _replace(self, layer: DecoderLayer, packed: Mapping[str, Packed], notes: list[dict[str, Any]]) -> None:
        if self._held_back:
            self._held.append((layer, packed, notes))
            return
        for note in notes:
            name, one = layer.full_name(note["name"]), packed[note["name"]]
            tensors = {key: tensor.to(self._model.device) for key, tensor in one.tensors.items()}
            replace_linear(self._model, name, Packed(one.spec, tensors))
            self.entries[name] = note["entry"] | {DIGESTS: {}}  # digests are computed when the model is saved


def _tensors(packed: Mapping[str, Packed], exact: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a decoder layer's piece of the journal."""
    tensors = {f"{name} {key}": tensor for name, one in packed.items() for key, tensor in one.tensors.items()}
    return tensors | {f"{name} {EXACT}": weight for name, weight in exact.items()}


def _read(
    tensors: Mapping[str, Tensor], notes: list[dict[str, Any]]
) -> tuple[dict[str, Packed], dict[str, Tensor], list[dict[str, Any]]]:
    """Return the packed layers of a piece of the journal, the weights that they do not store exactly, and its notes."""
    packed = {}
    for note in notes:
        declared = Packed.empty(WeightSpec.from_dict(note["entry"]))
        packed[note["name"]] = Packed(
            declared.spec, {key: tensors[f"{note['name']} {key}"] for key in declared.tensors}
        )
    exact = {name: tensors[f"{name} {EXACT}"] for name in packed if f"{name} {EXACT}" in tensors}
    return packed, exact, notes
