"""A pass over vLLM's compiled graphs: norms, residuals and SiLU become prologues and epilogues of packed matmuls.

It applies to steps of at most `MAX_FUSED_TOKENS` tokens, for which vLLM compiles the graph once more. With more tokens,
vLLM's compiler fuses these operations with each other. In the fused graphs, Inductor's kernels use programmatic
dependent launch too: a token of llama2-7b's shapes in gqs W4S50 takes 2.50 ms unfused, 2.40 fused, 2.23 with both (one
H200, results/h200/vllm.csv).
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._inductor import config as inductor_config
from torch._inductor.pattern_matcher import Match, PatternExpr, fwd_only, gen_pattern
from torch.nn import functional as F
from vllm.compilation.passes.inductor_pass import InductorPass
from vllm.config import CompilationMode, VllmConfig
from vllm.config.utils import Range
from vllm.ir import ops
from vllm.logger import init_logger
from vllm.platforms import current_platform

from semisparse.integrations.vllm.launch import may_launch_early
from semisparse.integrations.vllm.settings import FUSION, wants
from semisparse.nn.dense_copy import CopiedLinear
from semisparse.nn.fused_linear import ADDED, GATED, MAX_FUSED_TOKENS, NORMED, can_fuse, has_fused_kernels, packed_of

WITH_COPY = torch.ops.semisparse.linear_or_copy.default

LINEARS = (torch.ops.semisparse.linear.default, WITH_COPY)
"""Packed matmuls. Their first five arguments are the same: x, the packed tensors, bias, spec and kernel."""

FUSED = torch.ops.semisparse.fused_linear.default

PDL = "triton.enable_pdl"
"""Inductor's setting for programmatic dependent launch of its kernels."""

VIEWS = (
    operator.getitem,
    torch.ops.aten.alias.default,
    torch.ops.aten.detach.default,
    torch.ops.aten.reshape.default,
    torch.ops.aten.slice.Tensor,
    torch.ops.aten.split.Tensor,
    torch.ops.aten.split_with_sizes.default,
    torch.ops.aten.view.default,
)
"""Operators of which no kernel computes anything."""

GATE_NODES = 12
"""Most nodes between a matmul and the end of its activation: two slices, conversions, a sigmoid, two products."""

logger = init_logger("vllm.semisparse")


def install_fusion(vllm_config: VllmConfig, formats: Iterable[str]) -> bool:
    """Let vLLM compile its graphs once more, for few tokens, with this pass. Return whether it will.

    ``--additional-config '{"semisparse_fusion": false}'`` turns it off. Nothing is installed either if vLLM does not
    compile, runs on no GPU, or has another pass of its user, or if no format has kernels that fuse anything.

    Args:
        vllm_config: changed if the pass is installed.
        formats: the names of the compressed layers' formats.
    Raises:
        InputError: the setting is neither true nor false.
    """
    wanted = wants(vllm_config, FUSION, True)
    _turn_off_early_launches(vllm_config.compilation_config.inductor_compile_config)
    compilation, key = vllm_config.compilation_config, current_platform.pass_key
    if not wanted or compilation.mode != CompilationMode.VLLM_COMPILE or not current_platform.is_cuda():
        return False
    settings = compilation.inductor_compile_config
    if key in settings:
        if not isinstance(settings[key], FusionPass):
            logger.warning("packed matmuls are not fused: %s has another pass", key)
        return isinstance(settings[key], FusionPass)
    if not has_fused_kernels(formats):
        return False
    settings[key] = FusionPass()
    ends = compilation.compile_ranges_endpoints or []
    compilation.compile_ranges_endpoints = sorted({MAX_FUSED_TOKENS, *ends})
    logger.info("norms, residuals and SiLU are fused into packed matmuls of up to %d tokens", MAX_FUSED_TOKENS)
    return True


def _turn_off_early_launches(settings: dict[str, Any]) -> None:
    """Turn off programmatic dependent launch of Inductor's kernels for all graphs.

    The pass turns it on for a graph in which it is safe, and Inductor turns it off again after that.

    Args:
        settings: vLLM's settings of Inductor, changed.
    """
    if settings.get(PDL, getattr(inductor_config.triton, "enable_pdl", False)):
        logger.warning("%s is turned off: beside packed matmuls it is safe only where they are fused", PDL)
    if hasattr(inductor_config.triton, "enable_pdl"):
        settings[PDL] = False


class Norm(NamedTuple):
    """An RMSNorm in a graph: the nodes of what it normalises, of its weight and epsilon, and of its output."""

    x: Any
    weight: Any
    epsilon: Any
    normed: fx.Node


class FusionPass(InductorPass):
    """Replaces packed matmuls, and the operations before and after them, by ``semisparse::fused_linear``.

    Inductor's remaining kernels in such a graph use programmatic dependent launch where `may_launch_early` allows it.
    """

    def uuid(self) -> str:
        """Return a hash of the pass and of the operator: vLLM caches compiled graphs by it."""
        sources = (Path(__file__).read_text(), inspect.getsource(may_launch_early))
        return str(self.hash_source(*sources, str(FUSED._schema)))

    def is_applicable_for_range(self, compile_range: Range) -> bool:
        """Return whether the graph is for at most `MAX_FUSED_TOKENS` tokens."""
        return bool(compile_range.end <= MAX_FUSED_TOKENS)

    def __call__(self, graph: fx.Graph) -> None:
        """Fuse everything that one kernel can compute."""
        for node in list(graph.nodes):
            if node.target is ops.fused_add_rms_norm.torch_op and _is_plain(node, 2):
                _fuse_added_norm(graph, node)
            elif node.target is ops.rms_norm.torch_op and _is_plain(node, 1):
                x, weight, epsilon = node.args[:3]
                _fuse_norm(graph, Norm(x, weight, epsilon, node))
        graph.eliminate_dead_code()
        if any(node.target is FUSED for node in graph.nodes) and may_launch_early(graph, (*LINEARS, FUSED)):
            inductor_config.triton.enable_pdl = True


def _is_plain(norm: fx.Node, inputs: int) -> bool:
    """Return whether a norm has a weight and is over whole rows, as fused kernels compute it.

    They read tensors of one dtype, and the weight before what precedes them has ended, so no kernel may compute it.
    vLLM adds 1 to Gemma's weights, in float32.

    Args:
        norm: its arguments are ``inputs`` tensors, the weight, epsilon and the variance's size.
        inputs: number of tensors before the weight.
    """
    tensors, variance_size = norm.args[: inputs + 1], norm.args[inputs + 2 :]
    if not all(isinstance(tensor, fx.Node) for tensor in tensors) or not _is_stored(tensors[-1]):
        return False
    return len({tensor.meta["val"].dtype for tensor in tensors}) == 1 and variance_size in ((), (None,))  # type: ignore[union-attr]


def _is_stored(node: Any) -> bool:
    """Return whether a node is an input of the graph or a view of one, or None: what no kernel of the graph writes."""
    while isinstance(node, fx.Node) and node.target in VIEWS:
        node = node.args[0]
    return node is None or node.op in ("placeholder", "get_attr")


def _fuse_added_norm(graph: fx.Graph, node: fx.Node) -> None:
    """Fuse the residual into the matmul before a norm, and the norm into the matmul after it."""
    delta, residual, weight, epsilon = node.args[:4]
    assert isinstance(delta, fx.Node)
    normed, total = _item(node, 0), _item(node, 1)
    if normed is None:
        return
    fuses_add = delta.target in LINEARS and len(delta.users) == 1 and _can_fuse(delta, ADDED)
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
    if len(users) != 1 or users[0].target not in LINEARS or users[0].args[0] is not normed:
        return None
    linear, gate = users[0], _gate_of(users[0])
    if gate is not None and _can_fuse(linear, GATED):
        return linear, gate
    return (linear, linear) if _can_fuse(linear, NORMED) else None


def _item(node: fx.Node, index: int) -> fx.Node | None:
    """Return the node that reads one of several outputs, or None."""
    return next((user for user in node.users if user.target is operator.getitem and user.args[1] == index), None)


def _can_fuse(linear: fx.Node, fusion: tuple[str, str]) -> bool:
    """Return whether one kernel computes a matmul of the graph with a prologue and an epilogue.

    A matmul whose dense copy is faster for so few tokens is left to the copy.
    """
    arguments: Any = linear.args
    x, tensors, bias, spec, kernel = arguments[:5]
    if not _is_stored(bias):
        return False
    packed, dtype = packed_of(spec, [tensor.meta["val"] for tensor in tensors]), x.meta["val"].dtype
    if linear.target is WITH_COPY and CopiedLinear.pays(packed, MAX_FUSED_TOKENS, dtype):
        return False
    return kernel == "auto" and can_fuse(packed, dtype, fusion)


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
