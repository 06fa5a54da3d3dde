"""What a compression will take of host memory, device memory and disk, before it begins."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch
from torch import Tensor
from transformers import PreTrainedModel

from semisparse.api.rivals import TOKENS
from semisparse.api.targets import menu
from semisparse.compress import Choice, Ranks, Recipe
from semisparse.compress.layers import DecoderLayer
from semisparse.compress.search import PROFILE_TOKENS, sample
from semisparse.compress.search.anew import TOGETHER
from semisparse.compress.search.streaming import KEPT, STATES
from semisparse.compress.tune.predictions import KEPT as KEPT_PREDICTIONS
from semisparse.errors import InputError
from semisparse.patterns import Group, parse_pattern
from semisparse.quant.group import KINDS, SYMMETRIC_COLUMNS

HESSIANS = 10.4
"""Maximum number of float32 matrices [K, K] while a linear layer is pruned by its Hessian."""

BATCH_BYTES = 40
"""Bytes per token of a batch and input feature of the widest linear layer: a forward pass and the sums over tokens."""

MASK_BYTES = 48
"""Bytes per weight of the largest linear layer, while its mask is chosen and it is packed."""

LOGITS = 4
"""Copies of the float32 logits while dense low-bit models are measured (rivals.py)."""

PREDICTION_BYTES = 6 * KEPT_PREDICTIONS
"""Bytes per token of the dense model's predictions, for ``tune=bqpo+kl``."""

PIECES = 3
"""Copies of a decoder layer in the model's dtype: one being packed, one being written, and its file's content."""

CGROUPS = {
    Path("/sys/fs/cgroup"): ("memory.max", "memory.current", "inactive_file"),
    Path("/sys/fs/cgroup/memory"): ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""Root folders of cgroup versions 2 and 1. For each: the files with the memory limit and the memory in use, and the
page cache's key in ``memory.stat``. The page cache is in use but counts as free."""

OWN_CGROUPS = Path("/proc/self/cgroup")
"""Lists the cgroup of this process, per version and controller, as a path below the root folder."""


@dataclass(frozen=True)
class Needs:
    """Upper estimates of the bytes that a compression takes.

    Args:
        host: of host memory, beside what is mapped from files.
        device: of GPU memory; 0 on a CPU.
        disk: of the unfinished work and the result.
        offload: of the disk for hidden states; 0 if they are in memory.
        offload_to: its directory.
        ranks: the processes on this host that take all this together; each has a GPU of its own.
    """

    host: int
    device: int
    disk: int
    offload: int = 0
    offload_to: Path | None = None
    ranks: int = 1

    def __str__(self) -> str:
        parts = {"host memory": self.host, "GPU memory": self.device, "disk": self.disk}
        parts[f"{self.offload_to} for hidden states"] = self.offload
        sizes = ", ".join(f"{_text(size)} of {name}" for name, size in parts.items() if size)
        return f"compressing takes up to {sizes}" + (f", in {self.ranks} ranks on this host" if self.ranks > 1 else "")

    def on_each(self, ranks: int) -> Needs:
        """Return the needs of ``ranks`` such processes on one host."""
        return replace(self, host=ranks * self.host, offload=ranks * self.offload, ranks=ranks)

    def fits(self, free: Needs) -> bool:
        """Return whether there is enough memory of host and device."""
        return self.host <= free.host and self.device <= free.device

    def check(self, free: Needs) -> None:
        """Raise unless there is enough memory. The disk is not checked: a run that fills it can be resumed.

        Raises:
            InputError: too little memory, or room for hidden states; says how much.
        """
        if self.offload > free.offload:
            raise InputError(
                f"the hidden states take up to {_text(self.offload)} of {self.offload_to}, {_text(free.offload)} are "
                "free: use fewer --samples, or another --offload"
            )
        advice = "use fewer --samples, or a machine with more"
        for name, needed, available in (("host", self.host, free.host), ("GPU", self.device, free.device)):
            if needed > available:
                raise InputError(
                    f"compressing takes up to {_text(needed)} of {name} memory, {_text(available)} are free: {advice}"
                )


def needs_of(
    model: PreTrainedModel,
    layers: Sequence[DecoderLayer],
    plan: Recipe,
    batches: Sequence[Tensor],
    device: torch.device,
    ranks: Ranks,
    offload: Path | None,
    streams: bool = False,
) -> Needs:
    """Return what a compression will take, in all of its processes on this host.

    Args:
        model: as it will be compressed.
        layers: its decoder layers.
        plan: how it will be compressed.
        batches: calibration token ids, each [batch, tokens] int64.
        device: where one decoder layer at a time is compressed.
        ranks: the processes.
        offload: the directory of hidden states; None if they are in memory.
        streams: whether a search over a bank scores candidates with one decoder layer at a time on the device.
    """
    weights = [layer.weight(name) for layer in layers for name in layer.patterns]
    largest_layer = max(_layer_sizes(layers))
    whole = sum(parameter.nbytes for parameter in model.parameters())
    host = PIECES * largest_layer * model.dtype.itemsize
    compute = MASK_BYTES * max(weight.numel() for weight in weights)
    disk = 2 * sum(weight.nbytes for weight in weights) + whole
    states = 0
    if batches:
        host += LOGITS * 4 * model.get_input_embeddings().weight.shape[0] * TOKENS[1]
        states, beside = _calibration_bytes(model, layers, plan, batches, ranks)
        compute += beside + (0 if offload else states) + _scoring_bytes(model, layers, plan, batches, streams)
    if plan.searches_bank and not streams:  # a float32 copy of the model; its pruned levels lie on disk
        compute += whole * 4 // model.dtype.itemsize
    predictions, training = _end_to_end_bytes(model, plan, batches, device)
    host, compute = host + predictions, compute + training
    if plan.search == "joint":  # every layer in every way that it may choose; one decoder layer at a time is in memory
        choices = menu(plan, rounds_activations="prompt" in dict(plan.targets))
        ways = sum(_bytes_per_weight(choice, model.dtype.itemsize) for choice in choices)
        host += 2 * int(ways * largest_layer)  # one decoder layer is written while the next one is pruned
        disk += int(ways * sum(weight.numel() for weight in weights))
    on_disk = (states, offload) if offload else (0, None)
    needs = Needs(host, compute, disk, *on_disk) if device.type == "cuda" else Needs(host + compute, 0, disk, *on_disk)
    return needs.on_each(ranks.on_this_host)


def _calibration_bytes(
    model: PreTrainedModel, layers: Sequence[DecoderLayer], plan: Recipe, batches: Sequence[Tensor], ranks: Ranks
) -> tuple[int, int]:
    """Return the bytes of the hidden states, and the others that pruning a decoder layer takes, on the device."""
    features = model.get_input_embeddings().weight.shape[1]
    own = ranks.share(batches)[0] if plan.tune == "none" else batches  # the first rank tunes on all of them
    sampled, held = _tokens(sample(own, PROFILE_TOKENS) if own else ()), _tokens(own)
    # Two models' states; a third, the targets, while a decoder layer is tuned.
    states = (2 if plan.tune == "none" else 3) * 4 * features * held
    columns = max(layer.weight(name).shape[1] for layer in layers for name in layer.patterns)
    beside = 2 * 4 * max(_layer_sizes(layers)) + int(HESSIANS * 4 * columns**2)
    beside += BATCH_BYTES * columns * max(batch.numel() for batch in batches)
    if plan.search == "joint":  # the Hessian is kept for the next pattern
        beside += 4 * columns**2
    if plan.search == "profile" and sampled < held:  # candidates side by side, and what the dense layer reads
        states = max(states, (TOGETHER + 1) * 4 * features * sampled)
        beside += 4 * sampled * max(sum(layer.weight(name).shape[1] for name in layer.patterns) for layer in layers)
    return states, beside


def _scoring_bytes(
    model: PreTrainedModel, layers: Sequence[DecoderLayer], plan: Recipe, batches: Sequence[Tensor], streams: bool
) -> int:
    """Return the bytes on the device that scoring takes, if one decoder layer at a time is there; else 0."""
    if plan.search != "profile" and not (plan.searches_bank and streams):
        return 0
    vocabulary, features = model.get_input_embeddings().weight.shape
    drawn = plan.search_tokens + max(batch.shape[1] for batch in batches)  # whole sequences
    scored = min(drawn, _tokens(batches))
    sizes = _layer_sizes(layers)
    whole = sum(parameter.nbytes for parameter in model.parameters()) // model.dtype.itemsize
    # what is outside of the decoder layers, one of them, and predictions
    size = (whole - sum(sizes) + max(sizes)) * 4 + LOGITS * 4 * vocabulary * scored
    return size + (KEPT * len(layers) * 4 * features * scored + STATES if streams else 0)


def _end_to_end_bytes(
    model: PreTrainedModel, plan: Recipe, batches: Sequence[Tensor], device: torch.device
) -> tuple[int, int]:
    """Return the bytes of host memory, and those where it computes, that tuning end to end takes; 0 without it."""
    whole = sum(parameter.nbytes for parameter in model.parameters())
    host, compute = 2 * whole if plan.tunes_end_to_end else 0, 0
    if plan.needs_predictions:  # the dense model's copy on the device, and its predictions
        host += PREDICTION_BYTES * _tokens(batches)
        wide = 4 * whole // model.dtype.itemsize  # in float32
        compute = wide if device.type == "cpu" else whole
        if plan.tune == "bqpo+distil":  # trained: a copy of the model, its gradients, two moments, the best weights
            compute = max(compute, 5 * wide)
    return host, compute


def _layer_sizes(layers: Sequence[DecoderLayer]) -> list[int]:
    """Return each decoder layer's number of parameters."""
    return [sum(parameter.numel() for parameter in layer.module.parameters()) for layer in layers]


def _tokens(batches: Sequence[Tensor]) -> int:
    return sum(batch.numel() for batch in batches)


def _bytes_per_weight(choice: Choice, item: int) -> float:
    """Return about how many bytes a bank takes per weight of a layer that is compressed by a choice."""
    pattern, bits = parse_pattern(choice.pattern), KINDS.get(choice.quant)
    if bits is None:
        return item * pattern.density + 1 / 8
    size = pattern.size if isinstance(pattern, Group) else SYMMETRIC_COLUMNS
    return (0.5 if bits <= 4 else 1.0) + 1 / 8 + (item + 4) / size


def free_memory(device: torch.device, offload: Path | None) -> Needs:
    """Return the free memory of host and device, and the room in a directory for hidden states.

    Memory is that within the limits of a container or a batch job. The disk of the result is left out.
    """
    limits = (_free_in(folder, *files) for root, files in CGROUPS.items() for folder in _cgroups(root))
    host = min([psutil.virtual_memory().available, *(free for free in limits if free is not None)])
    room = shutil.disk_usage(offload).free if offload else 0
    return Needs(host, torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0, 0, room, offload)


def _cgroups(root: Path) -> list[Path]:
    """Return the folders whose limits hold for this process: of its cgroup, and of all that this one is in.

    A container sees its own limit in the root folder. A batch job, such as Slurm's, has one in a folder below.
    """
    try:
        lines = [line.split(":", 2) for line in OWN_CGROUPS.read_text().splitlines()]
    except OSError:
        return [root]
    version_1 = CGROUPS[root][0] == "memory.limit_in_bytes"
    paths = [path for _, names, path in lines if ("memory" in names.split(",") if version_1 else not names)]
    own = root / (paths[0].lstrip("/") if paths else "")
    return [folder for folder in (own, *own.parents) if folder.is_relative_to(root)]


def _free_in(folder: Path, limit: str, used: str, cached: str) -> int | None:
    """Return the bytes that a cgroup's limit leaves free; None without a limit, or if a file is missing."""
    try:
        most, taken = (folder / limit).read_text().strip(), int((folder / used).read_text())
        lines = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return int(most) - taken + int(lines.get(cached, 0)) if most.isdecimal() else None
    except (OSError, ValueError):
        return None  # no container, or a sandbox whose files differ: what psutil says is all that is known


def _text(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.0f} MB"
