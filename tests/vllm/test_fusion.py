"""The pass over vLLM's graphs: what it fuses, what it leaves, and that the graph computes the same."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._inductor import config as inductor_config

import semisparse
from semisparse.errors import InputError
from semisparse.formats import Packed
from semisparse.nn import CopiedLinear, dense_copy
from semisparse.patterns import parse_pattern
from tests.vllm import ranks

pytest.importorskip("vllm", reason="vLLM is not installed: make test-serving sets it up")

pytestmark = [pytest.mark.xdist_group("vllm"), pytest.mark.usefixtures("group")]

HIDDEN, INNER, TOKENS = 128, 192, 2


def packed_weight(n: int, k: int) -> Packed:
    weight, pattern = torch.randn(n, k, dtype=torch.bfloat16) * 0.05, parse_pattern("32:64")
    return semisparse.pack(weight * pattern.mask(weight.abs()), format="bitmask", pattern="32:64")


class Block:
    """What vLLM computes between two attentions of a Llama, as its modules do."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.o, self.gate_up = packed_weight(HIDDEN, HIDDEN), packed_weight(2 * INNER, HIDDEN)
        self.down, self.qkv = packed_weight(HIDDEN, INNER), packed_weight(3 * HIDDEN, HIDDEN)
        self.norms = [torch.rand(HIDDEN, dtype=torch.bfloat16) + 0.5 for _ in range(2)]

    def norm(self, index: int, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        from vllm import ir

        return ir.ops.fused_add_rms_norm(x, residual, self.norms[index], 1e-6, None)

    def activation(self, x: Tensor) -> Tensor:
        from vllm.model_executor.layers.activation import SiluAndMul

        return SiluAndMul.forward_native(x)

    def linear(self, x: Tensor, packed: Packed) -> Tensor:
        return semisparse.linear(x, packed)

    def __call__(self, attention: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        hidden, residual = self.norm(0, self.linear(attention, self.o), residual)
        hidden = self.activation(self.linear(hidden, self.gate_up))
        hidden, residual = self.norm(1, self.linear(hidden, self.down), residual)
        return self.linear(hidden, self.qkv), residual


def fused(block: Any, monkeypatch: pytest.MonkeyPatch, can_fuse: Any = lambda packed, dtype, fusion: True) -> Counter:
    """Compile a block with the pass, compare its outputs with the eager ones, and return the matmuls of its graph."""
    from vllm.compilation.passes.inductor_pass import InductorPass

    from semisparse.integrations.vllm import fusion

    monkeypatch.setattr(fusion, "can_fuse", can_fuse)
    found: Counter[str] = Counter()

    class Spy(InductorPass):
        def __call__(self, graph: fx.Graph) -> None:
            fusion.FusionPass()(graph)
            graph.lint()
            if inductor_config.triton.enable_pdl:
                found["early"] += 1
            for node in graph.nodes:
                if node.target is fusion.FUSED:
                    *_, norm, _, residual, gated = node.args
                    found["normed" if norm is not None else "added"] += 1
                    found["gated"] += gated
                    assert (norm is None) is (residual is not None)
                elif "semisparse" in str(node.target) or "rms_norm" in str(node.target):
                    found[str(node.target).split(".")[-2]] += 1

        def uuid(self) -> object:
            return object()  # nothing compiled is cached

    torch._dynamo.reset()
    given = [torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16) for _ in range(2)]
    options = {"post_grad_custom_post_pass": Spy(), "fx_graph_cache": False, fusion.PDL: False}
    for y, wanted in zip(torch.compile(block, dynamic=True, options=options)(*given), block(*given), strict=True):
        assert (y - wanted).float().norm() <= 2**-7 * wanted.float().norm()
    assert not inductor_config.triton.enable_pdl  # of other graphs
    return found


def test_all_around_the_matmuls_of_a_decoder_layer_is_fused(monkeypatch: pytest.MonkeyPatch):
    assert fused(Block(), monkeypatch) == {"added": 2, "normed": 2, "gated": 1, "early": 1}


@pytest.mark.parametrize("fewest", [TOKENS, TOKENS + 1])
def test_matmuls_with_dense_copies_are_fused_unless_the_copies_are_faster(fewest: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dense_copy, "MANY_TOKENS", {0: fewest})

    class Copied(Block):
        def linear(self, x: Tensor, packed: Packed) -> Tensor:
            return self.copies[id(packed)](x)

        def __init__(self) -> None:
            super().__init__()
            weights = (self.o, self.gate_up, self.down, self.qkv)
            self.copies = {id(packed): CopiedLinear(packed, torch.bfloat16) for packed in weights}

    all_fused = {"added": 2, "normed": 2, "gated": 1, "early": 1}
    by_copies = {"linear_or_copy": 4, "fused_add_rms_norm": 2}
    assert fused(Copied(), monkeypatch) == (by_copies if fewest <= TOKENS else all_fused)


def test_the_norm_after_an_all_reduce_is_fused(monkeypatch: pytest.MonkeyPatch):
    class Reduced(Block):
        def linear(self, x: Tensor, packed: Packed) -> Tensor:
            y = super().linear(x, packed)
            return 2 * y if packed is self.o or packed is self.down else y

    assert fused(Reduced(), monkeypatch) == {"normed": 2, "gated": 1, "linear": 2}


def test_a_norm_or_residual_of_another_dtype_is_not_fused(monkeypatch: pytest.MonkeyPatch):
    wide = Block()
    wide.norms = [norm.float() for norm in wide.norms]
    assert fused(wide, monkeypatch) == {"linear": 4, "fused_add_rms_norm": 2}

    class WideResidual(Block):
        def __call__(self, attention: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
            return super().__call__(attention, residual.float())

    assert fused(WideResidual(), monkeypatch)["added"] == 1  # the second residual is what the first norm gives


@pytest.mark.parametrize(
    ("refused", "found"),
    [
        ("ADDED", {"linear": 2, "normed": 2, "gated": 1}),
        ("GATED", {"added": 2, "normed": 2, "gated": 0, "early": 1}),
        ("NORMED", {"added": 2, "normed": 1, "gated": 1, "linear": 1, "rms_norm": 1, "early": 1}),
    ],
)
def test_what_no_kernel_fuses_is_computed_around_it(refused: str, found: dict[str, int], monkeypatch):
    from semisparse.nn import fused_linear

    fusion = getattr(fused_linear, refused)
    assert fused(Block(), monkeypatch, lambda packed, dtype, asked: asked != fusion) == found


def test_nothing_is_changed_where_nothing_can_be_fused(monkeypatch: pytest.MonkeyPatch):
    found = fused(Block(), monkeypatch, lambda packed, dtype, fusion: False)
    assert found == {"linear": 4, "fused_add_rms_norm": 2}


def test_kernels_that_read_what_an_earlier_matmul_wrote_are_not_launched_early(monkeypatch: pytest.MonkeyPatch):
    class Older(Block):
        """The last sum reads the first one, which two matmuls may overtake."""

        def __call__(self, attention: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
            hidden, residual = super().__call__(attention, residual)
            return hidden, hidden[:, :HIDDEN] + residual

    class Unordered(Block):
        """The last matmul does not depend on the operation before it, and may be computed first."""

        def __call__(self, attention: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
            hidden, first = self.norm(0, self.linear(attention, self.o), residual)
            return self.linear(hidden, self.qkv), self.linear(attention.sin(), self.o) + first.sin()

    for block in (Older(), Unordered()):
        found = fused(block, monkeypatch)
        assert found["normed"]
        assert not found["early"]


def test_a_norm_weight_or_bias_that_the_graph_computes_is_not_fused(monkeypatch: pytest.MonkeyPatch):
    """Fused kernels read both before the preceding kernel has ended."""

    class Shifted(Block):
        def norm(self, index: int, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
            from vllm import ir

            return ir.ops.fused_add_rms_norm(x, residual, self.norms[index] + 1, 1e-6, None)

    assert fused(Shifted(), monkeypatch) == {"linear": 4, "fused_add_rms_norm": 2}

    class Biased(Block):
        def linear(self, x: Tensor, packed: Packed) -> Tensor:
            return semisparse.linear(x, packed, x[0, 0].expand(packed.shape[0]).contiguous())

    assert fused(Biased(), monkeypatch)["linear"] == 4


def test_a_norm_that_another_operation_reads_is_not_fused(monkeypatch: pytest.MonkeyPatch):
    class Read(Block):
        def __call__(self, attention: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
            hidden, residual = self.norm(0, semisparse.linear(attention, self.o), residual)
            return semisparse.linear(hidden, self.qkv), residual + hidden

    assert fused(Read(), monkeypatch) == {"added": 1, "gated": 0, "rms_norm": 1, "linear": 1}


def test_an_activation_that_is_not_all_that_reads_two_halves_is_not_fused(monkeypatch: pytest.MonkeyPatch):
    class Swapped(Block):
        def activation(self, x: Tensor) -> Tensor:
            return super().activation(torch.cat(x.chunk(2, -1)[::-1], -1))

    class Quarter(Block):
        def activation(self, x: Tensor) -> Tensor:
            quarter = x.shape[-1] // 4
            y = torch.nn.functional.silu(x[..., :quarter]) * x[..., quarter : 2 * quarter]
            return torch.cat([y, y], -1)

    class Read(Block):
        def activation(self, x: Tensor) -> Tensor:
            return super().activation(x) + (-x).mean(-1, keepdim=True)

    for block in (Swapped(), Quarter(), Read()):
        assert fused(block, monkeypatch)["gated"] == 0


def config(**changes: Any) -> Any:
    from vllm.config import CompilationMode

    compilation = {
        "mode": CompilationMode.VLLM_COMPILE,
        "inductor_compile_config": {},
        "compile_ranges_endpoints": [64],
    }
    additional = changes.pop("additional_config", {})
    return SimpleNamespace(compilation_config=SimpleNamespace(**(compilation | changes)), additional_config=additional)


FORMATS = ("slide24", "bitmask")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """vLLM's platform, which is CUDA."""
    from semisparse.integrations.vllm import fusion

    platform = SimpleNamespace(pass_key="post_grad_custom_post_pass", is_cuda=lambda: True)
    monkeypatch.setattr(fusion, "current_platform", platform)
    return platform


def test_it_is_installed_for_few_tokens(gpu: SimpleNamespace):
    from vllm.config.utils import Range

    from semisparse.integrations.vllm import fusion

    for additional in ({"semisparse_fusion": True}, "of another plugin"):
        assert fusion.install_fusion(config(additional_config=additional), FORMATS)
    changed = config()
    assert fusion.install_fusion(changed, FORMATS)
    assert changed.compilation_config.compile_ranges_endpoints == [fusion.MAX_FUSED_TOKENS, 64]
    settings = changed.compilation_config.inductor_compile_config
    installed = settings[gpu.pass_key]
    assert installed.is_applicable_for_range(Range(1, fusion.MAX_FUSED_TOKENS))
    assert not installed.is_applicable_for_range(Range(fusion.MAX_FUSED_TOKENS + 1, 64))
    assert settings[fusion.PDL] is False
    assert fusion.install_fusion(changed, FORMATS)


def test_it_is_not_installed_where_nothing_is_fused(gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch):
    from semisparse.integrations.vllm import fusion

    assert not fusion.install_fusion(config(mode=None), FORMATS)
    assert not fusion.install_fusion(config(additional_config={"semisparse_fusion": False}), FORMATS)
    own = config(inductor_compile_config={"post_grad_custom_post_pass": object()})
    assert not fusion.install_fusion(own, FORMATS)
    assert own.compilation_config.compile_ranges_endpoints == [64]
    with monkeypatch.context() as patch:
        patch.setattr(fusion, "has_fused_kernels", lambda formats: False)
        assert not fusion.install_fusion(config(), FORMATS)
    gpu.is_cuda = lambda: False
    assert not fusion.install_fusion(config(), FORMATS)


@pytest.mark.parametrize("additional", [{}, {"semisparse_fusion": False}])
def test_early_launches_for_all_graphs_are_turned_off(gpu: SimpleNamespace, additional: dict[str, bool]):
    from semisparse.integrations.vllm import fusion

    changed = config(inductor_compile_config={fusion.PDL: True}, additional_config=additional)
    fusion.install_fusion(changed, FORMATS)
    assert changed.compilation_config.inductor_compile_config[fusion.PDL] is False


def test_an_unknown_setting_is_refused(gpu: SimpleNamespace):
    from semisparse.integrations.vllm import fusion

    with pytest.raises(InputError, match="semisparse_fusion is 'no', expected true or false"):
        fusion.install_fusion(config(additional_config={"semisparse_fusion": "no"}), FORMATS)


def test_it_matches_the_real_settings():
    """The fields that `install_fusion` changes are those of the installed vLLM."""
    from vllm.config import CompilationConfig, VllmConfig

    assert {
        "mode",
        "inductor_compile_config",
        "compile_ranges_endpoints",
    } <= CompilationConfig.__dataclass_fields__.keys()
    assert "additional_config" in VllmConfig.__dataclass_fields__
    assert ranks  # the platform is set up by the group
