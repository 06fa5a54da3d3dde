"""Digests of tensors in the config block: they detect damage but do not protect against an attacker."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor

from semisparse.checkpoint.file_layers import DIGESTS, THREADS, is_blake2b, new_hash
from semisparse.errors import CheckpointError

Key = TypeVar("Key", bound=Hashable)

EMPTY: Mapping[str, str | None] = MappingProxyType({})


def digest_of(tensor: Tensor, blake: bool = False) -> str:
    """Return the SHA-256 digest of a tensor's bytes, or its BLAKE2b digest, in hexadecimal digits."""
    data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
    hasher = new_hash(blake)
    hasher.update(data)
    return str(hasher.hexdigest())


def digests_of(tensors: Mapping[Key, Tensor], blake: Collection[Key] = ()) -> dict[Key, str]:
    """Return the digest of each tensor, BLAKE2b for the keys in ``blake``, computed by a thread per core, up to 8."""
    with ThreadPoolExecutor(THREADS) as pool:
        computed = pool.map(lambda key: digest_of(tensors[key], key in blake), tensors)
        return dict(zip(tensors, computed, strict=True))


def check_digests(
    name: str, tensors: Mapping[str, Tensor], entry: Mapping[str, Any], computed: Mapping[str, str | None] = EMPTY
) -> None:
    """Compare a layer's tensors with the digests in its entry, if it has any.

    Args:
        name: the layer's module name, for error messages.
        tensors: as stored, by name.
        entry: the layer's entry in the config block.
        computed: digests by tensor name, as far as they are known.
    Raises:
        CheckpointError: a tensor differs from its digest (the first is named), or the entry names other tensors.
    """
    declared = entry.get(DIGESTS)
    if declared is None:
        return
    if not isinstance(declared, Mapping) or set(declared) != set(tensors):
        raise CheckpointError(f"layer {name}: its digests in config.json are not those of {', '.join(sorted(tensors))}")
    blake = is_blake2b(declared)
    for tensor, values in tensors.items():
        digest = computed.get(tensor) or digest_of(values, blake)
        check_digest(f"{name}.{tensor}", digest, declared[tensor])


def check_digest(name: str, digest: str, declared: Any) -> None:
    """Compare a tensor's digest with the one in config.json.

    Raises:
        CheckpointError: they differ.
    """
    if digest != declared:
        raise CheckpointError(
            f"tensor {name} has the digest {digest}, config.json declares {str(declared)[:64]}: the file is damaged or "
            "was changed; fetch or write it again"
        )
