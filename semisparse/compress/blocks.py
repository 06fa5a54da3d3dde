"""The decoder blocks of a causal language model, and what the model passes to them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from semisparse.errors import InputError
from semisparse.nn import is_linear


@dataclass(frozen=True)
class Call:
    """What a model passes to one block for one batch, apart from the hidden states.

    Args:
        args: positional arguments after the hidden states.
        kwargs: keyword arguments.
        hidden_name: keyword of the hidden states; None if they are the first positional argument.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    hidden_name: str | None

    def __call__(self, block: nn.Module, hidden: Tensor) -> Tensor:
        """Run the block on hidden states ([batch, tokens, features])."""
        if self.hidden_name is None:
            return main_tensor(block(hidden, *self.args, **self.kwargs))
        return main_tensor(block(*self.args, **{self.hidden_name: hidden}, **self.kwargs))

    def to(self, device: torch.device, dtype: torch.dtype) -> Call:
        """Move every tensor in the arguments; those of a float dtype also take `dtype`."""
        args, kwargs = _moved((self.args, self.kwargs), device, dtype)
        return Call(args, kwargs, self.hidden_name)


def main_tensor(output: Any) -> Tensor:
    """Give a module's main output, which comes alone or leads a tuple."""
    return output if isinstance(output, Tensor) else output[0]


def decoder_blocks(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """Find the decoder blocks and the name of their list: the module list that holds most of the model's weights.

    Raises:
        InputError: the model has no module list.
    """
    lists = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        raise InputError(f"{type(model).__name__} has no list of decoder blocks; a causal language model is expected")
    return max(lists, key=lambda found: sum(weight.numel() for weight in found[1].parameters()))


def linear_layers(block: nn.Module) -> dict[str, nn.Module]:
    """Give the linear layers inside a block, by their name in it."""
    return {name: module for name, module in block.named_modules() if is_linear(module)}


@torch.no_grad()
def record_calls(
    model: nn.Module, blocks: Sequence[nn.Module], batches: Sequence[Tensor]
) -> tuple[list[Tensor], list[list[Call]]]:
    """Run the model with its blocks left out, and record what it passes to each of them.

    Args:
        batches: token ids, each [batch, tokens] int64.
    Returns:
        the hidden states that enter the first block, one [batch, tokens, features] a batch; and for each block its
        calls, one a batch.
    """
    hidden: list[Tensor] = []
    calls: list[list[Call]] = [[] for _ in blocks]
    body = getattr(model, "base_model", model)
    device = next(model.parameters()).device
    with _recording(blocks, hidden, calls):
        for batch in batches:
            body(batch.to(device), use_cache=False)
    return hidden, calls


@contextlib.contextmanager
def _recording(blocks: Sequence[nn.Module], hidden: list[Tensor], calls: list[list[Call]]) -> Iterator[None]:
    """Let each block record its call and give its hidden states back, in the shape that a real block gives them."""
    in_tuple: list[bool] = []

    def recorder(index: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        def record(*args: Any, **kwargs: Any) -> Any:
            if not in_tuple:
                in_tuple.append(not isinstance(forward(*args, **kwargs), Tensor))
            name = None if args else "hidden_states"
            states = args[0] if name is None else kwargs.pop(name)
            if index == 0:
                hidden.append(states)
            calls[index].append(Call(args[1:], kwargs, name))
            return (states,) if in_tuple[0] else states

        return record

    for index, block in enumerate(blocks):
        block.forward = recorder(index, block.forward)
    try:
        yield
    finally:
        for block in blocks:
            del block.forward


def _moved(value: Any, device: torch.device, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(device, dtype if value.is_floating_point() else value.dtype)
    if isinstance(value, tuple | list):
        return type(value)(_moved(item, device, dtype) for item in value)
    if isinstance(value, dict):
        return {key: _moved(item, device, dtype) for key, item in value.items()}
    return value
