"""A pass over vLLM's compiled graphs: norms, residuals and SiLU become prologues and epilogues of packed matmuls.

It applies to steps of at most `MAX_FUSED_TOKENS` tokens, for which vLLM compiles the graph once more. With more tokens,
vLLM's compiler fuses these operations with each other. Off by default: it has run inside vLLM on no GPU yet.
"""

from __future__ import annotations

import operator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._inductor.pattern_matcher import Match, PatternExpr, fwd_only, gen_pattern
from torch.nn import functional as F
from vllm.compilation.passes.inductor_pass import InductorPass
from vllm.config import CompilationMode, VllmConfig
from vllm.config.utils import Range
from vllm.ir import ops
from vllm.platforms import current_platform

from semisparse.nn.fused_linear import ADDED, GATED, MAX_FUSED_TOKENS, NORMED, can_fuse, packed_of

LINEAR = torch.ops.semisparse.linear.default
FUSED = torch.ops.semisparse.fused_linear.default

SETTING = "semisparse_fusion"
"""The key in vLLM's ``additional_config`` that turns the pass on."""

GATE_NODES = 12
"""Maximum nodes from a matmul to the end of its activation: two slices, conversions, a sigmoid, two products."""


def install_fusion(vllm_config: VllmConfig) -> bool:
    """Let vLLM compile its graphs once more, for few tokens, with this pass, if `SETTING` is on; return if it will.

    ``--additional-config '{"semisparse_fusion": true}'`` turns it on. Nothing is installed if vLLM does not compile,
    runs on no GPU, or its user has installed another pass.
    """
    additional = vllm_config.additional_config
    if not isinstance(additional, dict) or additional.get(SETTING) is not True:
        return False
    compilation, key = vllm_config.compilation_config, current_platform.pass_key
    if compilation.mode != CompilationMode.VLLM_COMPILE or not current_platform.is_cuda():
        return False
    if key not in compilation.inductor_compile_config:
        compilation.inductor_compile_config[key] = FusionPass()
        ends = compilation.compile_ranges_endpoints or []
        compilation.compile_ranges_endpoints = sorted({MAX_FUSED_TOKENS, *ends})
    return isinstance(compilation.inductor_compile_config[key], FusionPass)


class Norm(NamedTuple):
    """An RMSNorm in a graph: the nodes of what it normalises, of its weight and epsilon, and of its output."""

    x: Any
    weight: Any
    epsilon: Any
    normed: fx.Node


class FusionPass(InductorPass):
    """Replaces packed matmuls, and the operations before and after them, by ``semisparse::fused_linear``."""

    def uuid(self) -> str:
        """Return a hash of this file: vLLM caches compiled graphs by it."""
        return str(self.hash_source(Path(__file__).read_text()))

    def is_applicable_for_range(self, compile_range: Range) -> bool:
        """Return whether the graph is for at most `MAX_FUSED_TOKENS` tokens."""
        return bool(compile_range.end <= MAX_FUSED_TOKENS)

    def __call__(self, graph: fx.Graph) -> None:
        """Fuse everything that one kernel can compute."""
        for node in list(graph.nodes):
            if node.target is ops.fused_add_rms_norm.torch_op and _is_plain(node.args[2:]):
                _fuse_added_norm(graph, node)
            elif node.target is ops.rms_norm.torch_op and _is_plain(node.args[1:]):
                x, weight, epsilon = node.args[:3]
                _fuse_norm(graph, Norm(x, weight, epsilon, node))
        graph.eliminate_dead_code()


def _is_plain(arguments: Any) -> bool:
    """Return whether a norm has a weight and is over whole rows: its arguments are weight, epsilon, variance size."""
    return isinstance(arguments[0], fx.Node) and (len(arguments) < 3 or arguments[2] is None)


def _fuse_added_norm(graph: fx.Graph, node: fx.Node) -> None:
    """Fuse the residual into the matmul before a norm, and the norm into the matmul after it."""
    delta, residual, weight, epsilon = node.args[:4]
    assert isinstance(delta, fx.Node)
    normed, total = _item(node, 0), _item(node, 1)
    if normed is None:
        return
    fuses_add = delta.target is LINEAR and len(delta.users) == 1 and _can_fuse(delta, ADDED)
    if not fuses_add and _readers(normed) is None:
        return
    with graph.inserting_before(node):
        if fuses_add:
            stream = graph.call_function(FUSED, (*delta.args[:4], None, 0.0, residual, False))
        else:
            stream = graph.call_function(torch.ops.aten.add.Tensor, (delta, residual))
    stream.meta["val"] = normed.meta["val"]
    if total is not None:
        total.replace_all_uses_with(stream)
    if not _fuse_norm(graph, Norm(stream, weight, epsilon, normed)):
        with graph.inserting_before(node):
            alone = graph.call_function(ops.rms_norm.torch_op, (stream, weight, epsilon))
        alone.meta["val"] = normed.meta["val"]
        normed.replace_all_uses_with(alone)


def _fuse_norm(graph: fx.Graph, norm: Norm) -> bool:
    """Fuse a norm into the only matmul that reads it, and the activation after that; return whether it could be."""
    readers = _readers(norm.normed)
    if readers is None:
        return False
    linear, last = readers
    with graph.inserting_before(last):
        operands = norm.weight, norm.epsilon, None, last is not linear
        fused = graph.call_function(FUSED, (norm.x, *linear.args[1:4], *operands))
    fused.meta["val"] = last.meta["val"]
    last.replace_all_uses_with(fused)
    return True


def _readers(normed: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Return the only matmul that reads a norm's output, and the end of its activation, if one kernel computes all.

    Without an activation that can be fused, the second is the matmul itself. None if the norm cannot be fused.
    """
    users = list(normed.users)
    if len(users) != 1 or users[0].target is not LINEAR or users[0].args[0] is not normed:
        return None
    linear, gate = users[0], _gate_of(users[0])
    if gate is not None and _can_fuse(linear, GATED):
        return linear, gate
    return (linear, linear) if _can_fuse(linear, NORMED) else None


def _item(node: fx.Node, index: int) -> fx.Node | None:
    """Return the node that reads one of several outputs, or None."""
    return next((user for user in node.users if user.target is operator.getitem and user.args[1] == index), None)


def _can_fuse(linear: fx.Node, fusion: tuple[str, str]) -> bool:
    """Return whether one kernel computes a matmul of the graph with a prologue and an epilogue."""
    arguments: Any = linear.args
    x, tensors, _, spec, kernel = arguments
    packed = packed_of(spec, [tensor.meta["val"] for tensor in tensors])
    return kernel == "auto" and can_fuse(packed, x.meta["val"].dtype, fusion)


def _silu_mul(y: torch.Tensor) -> torch.Tensor:
    """Compute the activation as vLLM's own code does without its CUDA kernel."""
    half = y.shape[-1] // 2
    return F.silu(y[..., :half]) * y[..., half:]


def _gate_of(linear: fx.Node) -> fx.Node | None:
    """Return the node that computes `_silu_mul` of a matmul's output, if nothing else reads that; else None."""
    value = linear.meta["val"]
    pattern: PatternExpr = gen_pattern(_silu_mul, [torch.empty(4, 8, dtype=value.dtype)], fwd_only)
    reached, halves = list(linear.users), set(linear.users)
    for node in reached:
        reached += [user for user in node.users if user not in reached][: GATE_NODES - len(reached)]
    for node in reached:
        match = pattern.match(node)
        if isinstance(match, Match) and linear in match.kwargs.values() and halves <= set(match.nodes):
            return node if _are_halves(halves, value.shape[-1]) else None
    return None


def _are_halves(slices: set[fx.Node], columns: int) -> bool:
    """Return whether nodes slice the columns of a tensor into two halves."""
    starts = sorted(int(node.args[2]) for node in slices)  # type: ignore[arg-type]
    return starts == [0, columns // 2] and {node.meta["val"].shape[-1] for node in slices} == {columns // 2}
