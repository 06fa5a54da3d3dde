"""The decoder layers of a causal language model, and the arguments that the model calls them with."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from semisparse.errors import InputError
from semisparse.nn import LINEAR_CLASSES


@dataclass(frozen=True)
class LayerCall:
    """The arguments of one call of a decoder layer, except the hidden states.

    Args:
        args: positional arguments after the hidden states.
        kwargs: keyword arguments.
        hidden_name: keyword of the hidden states; None if they are the first positional argument.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    hidden_name: str | None

    def __call__(self, layer: nn.Module, hidden: Tensor) -> Tensor:
        """Run a decoder layer with these arguments on hidden states [batch, tokens, features]; return the new ones."""
        if self.hidden_name is None:
            output = layer(hidden, *self.args, **self.kwargs)
        else:
            output = layer(*self.args, **{self.hidden_name: hidden}, **self.kwargs)
        return output if isinstance(output, Tensor) else output[0]

    def to(self, device: torch.device, dtype: torch.dtype, moved: list[tuple[Tensor, Tensor]]) -> LayerCall:
        """Move all tensors among the arguments to a device; floating-point ones are also cast to ``dtype``.

        Args:
            device: where to.
            dtype: such as float32.
            moved: pairs of a tensor and its copy, from earlier calls; new pairs are appended. An equal tensor is not
                copied again: the sines and masks of all batches and decoder layers would otherwise take three times
                the memory of the hidden states.
        """
        args, kwargs = _moved((self.args, self.kwargs), device, dtype, moved)
        return LayerCall(args, kwargs, self.hidden_name)


SUPPORTED = "semisparse compresses decoder-only transformers, and the text decoder of multimodal models"


def decoder_layers(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """Return the name and the modules of the list of decoder layers of a model's text decoder.

    It is the text decoder's module list with `num_hidden_layers` modules; of several such lists, or of all lists if
    there is none, the one with the most weights.

    Raises:
        InputError: the model is an encoder-decoder or has no attention, or has no module list.
    """
    kind, decoder = type(model).__name__, model.get_decoder() if isinstance(model, PreTrainedModel) else model
    inside = set(decoder.modules())
    every = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    lists = [item for item in every if item[1] in inside] or every  # ModernBERT's get_decoder() returns its head
    if not lists:
        raise InputError(f"{kind} has no list of decoder layers; {SUPPORTED}")
    config: Any = model.config
    text_config = config.get_text_config()
    if getattr(config, "is_encoder_decoder", False):
        raise InputError(f"{kind} is an encoder-decoder; {SUPPORTED}")
    if not hasattr(text_config, "num_attention_heads"):
        raise InputError(f"{kind} is a model without attention, such as a state-space model; {SUPPORTED}")
    declared = [item for item in lists if len(item[1]) == getattr(text_config, "num_hidden_layers", None)]
    return max(declared or lists, key=lambda item: sum(weight.numel() for weight in item[1].parameters()))


def linear_layers(layer: nn.Module) -> dict[str, nn.Module]:
    """Return a decoder layer's modules whose class is one of `LINEAR_CLASSES`, by name in the decoder layer."""
    return {name: module for name, module in layer.named_modules() if isinstance(module, LINEAR_CLASSES)}


def copy_to(
    module: nn.Module, device: torch.device, dtype: torch.dtype | None = None, shared: Sequence[nn.Module] = ()
) -> nn.Module:
    """Copy a dense module to a device, in another dtype if one is given; to a GPU without a copy in host memory.

    The copy has the modules of ``shared`` in common with the original: they are not copied.
    """
    copied: dict[int, Any] = {id(part): part for part in shared}
    left_out = {id(tensor) for part in shared for tensor in (*part.parameters(), *part.buffers())}
    for tensor in (*module.parameters(), *module.buffers()):
        if id(tensor) in left_out:
            continue
        moved = tensor.data.to(device, copy=True)  # cast on the device: on the host it takes longer than the transfer
        moved = moved.to(dtype) if dtype and moved.is_floating_point() else moved
        copied[id(tensor)] = nn.Parameter(moved, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else moved
    return copy.deepcopy(module, copied)


@torch.no_grad()
def record_calls(
    model: nn.Module, layers: Sequence[nn.Module], batches: Sequence[Tensor], take: Callable[[Tensor], None]
) -> list[list[LayerCall]]:
    """Run the model with its decoder layers skipped, and record the arguments of their calls.

    Args:
        model: a transformers causal language model.
        layers: its decoder layers.
        batches: token ids, each [batch, tokens] int64.
        take: called with the hidden states that enter the first decoder layer, [batch, tokens, features] of each batch.
    Returns:
        For each decoder layer its calls, one per batch.
    """
    calls: list[list[LayerCall]] = [[] for _ in layers]
    body = getattr(model, "base_model", model)
    device = next(model.parameters()).device

    def record(index: int, *args: Any, **kwargs: Any) -> Tensor:
        name = None if args else "hidden_states"
        states = args[0] if name is None else kwargs.pop(name)
        if index == 0:
            take(states)
        calls[index].append(LayerCall(args[1:], kwargs, name))
        if len(calls[0]) == len(calls[-1]) == min(map(len, calls)):
            raise _Learned  # the final norm of all tokens would run in the model's dtype, on a CPU
        return states

    with _replacing(model, layers, record):
        for batch in batches:
            with contextlib.suppress(_Learned):
                body(batch.to(device), use_cache=False)
    return calls


@torch.no_grad()
def logits_after(model: nn.Module, layers: Sequence[nn.Module], ids: Tensor, hidden: Tensor) -> Tensor:
    """Return a model's logits, [batch, tokens, vocabulary], given the hidden states after its last decoder layer.

    Args:
        model: a transformers causal language model.
        layers: its decoder layers, which do not run.
        ids: [batch, tokens] int64.
        hidden: [batch, tokens, features].
    """
    with _replacing(model, layers, lambda index, *args, **kwargs: hidden):
        return model(ids.to(hidden.device), use_cache=False).logits


@contextlib.contextmanager
def _replacing(model: nn.Module, layers: Sequence[nn.Module], forward: Callable[..., Tensor]) -> Iterator[None]:
    """Call ``forward(index, ...)`` instead of each decoder layer.

    Before that the first decoder layer runs on one token, to learn whether decoder layers return a tuple. If they do,
    ``forward``'s result is put in a tuple as long: Bamba's code unpacks two values.
    """
    others: list[tuple[None, ...] | None] = []  # what follows the hidden states in a tuple; None if there is no tuple

    def replaced(index: int, own: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not others:
                output = own(*args, **kwargs)
                others.append(None if isinstance(output, Tensor) else (None,) * (len(output) - 1))
                raise _Learned
            result = forward(index, *args, **kwargs)
            return result if others[0] is None else (result, *others[0])

        return call

    for index, layer in enumerate(layers):
        layer.forward = replaced(index, layer.forward)
    try:
        with contextlib.suppress(_Learned):
            body = getattr(model, "base_model", model)
            body(torch.zeros(1, 1, dtype=torch.int64, device=next(model.parameters()).device), use_cache=False)
        yield
    finally:
        for layer in layers:
            del layer.forward


class _Learned(Exception):
    """Ends a forward once what it was run for is known."""


def _moved(value: Any, device: torch.device, dtype: torch.dtype, moved: list[tuple[Tensor, Tensor]]) -> Any:
    if isinstance(value, Tensor):
        same = [copied for source, copied in moved if source is value] or [
            copied for source, copied in moved if source.dtype == value.dtype and torch.equal(source, value)
        ]
        if same:
            return same[0]
        moved.append((value, value.to(device, dtype if value.is_floating_point() else value.dtype)))
        return moved[-1][1]
    if isinstance(value, tuple | list):
        return type(value)(_moved(item, device, dtype, moved) for item in value)
    if isinstance(value, dict):
        return {key: _moved(item, device, dtype, moved) for key, item in value.items()}
    return value
