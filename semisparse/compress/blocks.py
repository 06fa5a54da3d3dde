"""The decoder blocks of a causal language model, and what the model passes to them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from semisparse.errors import InputError


@dataclass(frozen=True)
class Call:
    """What a model passed to one block for one batch, apart from the hidden states."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    hidden_name: str | None
    """Keyword that the hidden states were passed by; None if they were the first positional argument."""

    def __call__(self, block: nn.Module, hidden: Tensor) -> Tensor:
        """Run the block on other hidden states ([batch, tokens, features])."""
        if self.hidden_name is None:
            return first_tensor(block(hidden, *self.args, **self.kwargs))
        return first_tensor(block(*self.args, **{self.hidden_name: hidden}, **self.kwargs))


def decoder_blocks(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """Find the list of decoder blocks and its name: the module list that holds most of the model's weights.

    Raises:
        InputError: the model has no module list.
    """
    lists = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        raise InputError(f"{type(model).__name__} holds no list of decoder blocks; a causal language model is expected")
    return max(lists, key=lambda found: sum(weight.numel() for weight in found[1].parameters()))


def linear_layers(block: nn.Module) -> dict[str, nn.Module]:
    """Give the linear layers inside a block by name, in the order they were made."""
    return {name: module for name, module in block.named_modules() if isinstance(module, nn.Linear | Conv1D)}


def weight_of(linear: nn.Module) -> Tensor:
    """View a linear layer's weight as [N, K]; a transformers Conv1D stores it as [K, N]."""
    assert isinstance(linear.weight, Tensor)
    return linear.weight.detach().T if isinstance(linear, Conv1D) else linear.weight.detach()


def first_tensor(value: Any) -> Tensor:
    """Give a module's main output: it may come alone or lead a tuple."""
    return value if isinstance(value, Tensor) else value[0]


@torch.no_grad()
def record_calls(
    model: nn.Module, blocks: Sequence[nn.Module], batches: Sequence[Tensor]
) -> tuple[list[Tensor], list[list[Call]]]:
    """Run the model without its blocks, and record what it passes to each of them.

    Args:
        batches: token ids, each [batch, tokens].
    Returns:
        the hidden states that enter the first block, each [batch, tokens, features]; and for each block its
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
    """Let each block record its call and give its hidden states back unchanged, in the shape of a real output."""
    in_tuple: list[bool] = []

    def recorder(index: int, real: Callable[..., Any]) -> Callable[..., Any]:
        def record(*args: Any, **kwargs: Any) -> Any:
            if not in_tuple:
                in_tuple.append(not isinstance(real(*args, **kwargs), Tensor))
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
