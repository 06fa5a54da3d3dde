"""Compressing decoder layer by decoder layer, against what the finished model itself computes."""

import copy
import fnmatch

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, MixtralConfig, PreTrainedModel, Qwen2Config

from semisparse.compress import LayerReport, Recipe, compress_decoder_layers
from semisparse.compress.decoder import decoder_layers, linear_layers
from semisparse.errors import InputError, PatternError
from semisparse.nn import weight_of
from semisparse.patterns import parse_pattern
from tests.compress.checking import equal_weights, hidden_error
from tests.models import CONFIGS, VOCABULARY, random_model

_generator = torch.Generator().manual_seed(0)
BATCHES = [torch.randint(0, VOCABULARY, shape, generator=_generator) for shape in [(4, 30), (3, 30), (2, 17)]]
_SIZES = {"hidden_size": 24, "intermediate_size": 44, "num_attention_heads": 4, "num_key_value_heads": 2}
SLIDING = Qwen2Config(
    vocab_size=VOCABULARY,
    **_SIZES,
    num_hidden_layers=3,
    use_sliding_window=True,
    sliding_window=4,
    layer_types=["full_attention", "sliding_attention", "full_attention"],
)
"""The second decoder layer attends to the last four tokens only, so that its mask differs from the others'."""


def model_of(name: str) -> PreTrainedModel:
    if name in CONFIGS:
        return random_model(name, torch.float32)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(copy.deepcopy(SLIDING), dtype=torch.float32).eval()


def linears_of(model: nn.Module) -> dict[str, nn.Module]:
    """The linear layers of all decoder layers, by module name."""
    prefix, layers = decoder_layers(model)
    return {f"{prefix}.{i}.{name}": m for i, layer in enumerate(layers) for name, m in linear_layers(layer).items()}


def linear_inputs(model: PreTrainedModel) -> dict[str, Tensor]:
    """Run the whole model, and collect the inputs [tokens, K] of each linear layer."""
    inputs: dict[str, list[Tensor]] = {}

    def collect(name: str):
        return lambda _, args: inputs.setdefault(name, []).append(args[0].reshape(-1, args[0].shape[-1]))

    handles = [m.register_forward_pre_hook(collect(name)) for name, m in linears_of(model).items()]
    with torch.no_grad():
        for batch in BATCHES:
            model(batch)
    for handle in handles:
        handle.remove()
    return {name: torch.cat(parts) for name, parts in inputs.items()}


@pytest.mark.parametrize(
    ("architecture", "prune"),
    [*((architecture, "sparsegpt") for architecture in (*CONFIGS, "sliding")), ("llama", "wanda"), ("gpt2", "wanda")],
)
def test_errors_are_those_of_the_finished_model(architecture: str, prune: str):
    """The errors agree only if each linear layer was pruned on the inputs that it has in the finished model."""
    dense = model_of(architecture)
    model = copy.deepcopy(dense)
    reports = compress_decoder_layers(model, BATCHES, Recipe(pattern="2:4", prune=prune))
    before, after, inputs = linears_of(dense), linears_of(model), linear_inputs(model)
    assert {report.name for report in reports} == set(after)
    for report in reports:
        weight, pruned = weight_of(before[report.name]), weight_of(after[report.name])
        parse_pattern("2:4").check(pruned)
        assert report.density == int(pruned.count_nonzero()) / pruned.numel() <= 0.5
        x = inputs[report.name]
        change, power = pruned - weight, (weight @ x.T).square().sum()
        error = (change @ x.T).square().sum() / power
        # The report computes it from x^T x in float32: terms that cancel there leave a rounding of 2^-24 each.
        cancelled = ((change.abs() @ (x.T @ x).abs()) * change.abs()).sum() / power
        rounding = 2 * 2**-24 * float(cancelled)
        assert report.error**2 == pytest.approx(float(error), rel=1e-4, abs=rounding), report.name
        assert (report.pattern, report.outcome) == ("2:4", prune)


def test_nothing_else_is_changed():
    dense = random_model("llama-bias")
    model = copy.deepcopy(dense)
    compress_decoder_layers(model, BATCHES, Recipe(ignore=("*.q_proj", "model.layers.0.mlp.*")))
    untouched = ["*.bias", "*norm*", "*.q_proj.*", "model.layers.0.mlp.*", "lm_head.*", "*embed*"]
    for name, tensor in model.state_dict().items():
        was = dense.state_dict()[name]
        assert tensor.dtype == was.dtype
        same = any(fnmatch.fnmatchcase(name, glob) for glob in untouched)
        assert torch.equal(tensor, was) is same, name


@pytest.mark.parametrize("architecture", ["llama", "opt", "gpt2"])
def test_a_decoder_layer_compensates_the_error_of_the_one_before(architecture: str):
    """The first one is pruned. The second keeps all its weights, and changes them only with ``target=residual``."""
    dense = model_of(architecture)
    prefix, layers = decoder_layers(dense)
    second = [f"{prefix}.1.{name}" for name in linear_layers(layers[1])]
    full = {name: parse_pattern("1:1") for name in second}
    for target in ("local", "residual"):
        model = copy.deepcopy(dense)
        reports = compress_decoder_layers(model, BATCHES, Recipe(pattern="2:4", target=target), patterns=full)
        assert [report.pattern for report in reports] == ["2:4"] * (len(reports) - len(full)) + ["1:1"] * len(full)
        uncompensated = copy.deepcopy(model)
        for name in second:
            weight_of(uncompensated.get_submodule(name)).copy_(weight_of(dense.get_submodule(name)))
        ratio = hidden_error(model, dense, BATCHES) / hidden_error(uncompensated, dense, BATCHES)
        assert ratio == pytest.approx(1, abs=1e-3) if target == "local" else ratio < 0.99


def test_weights_too_small_for_the_dtype_leave_no_negative_zero():
    model = random_model("llama", torch.float16)
    weight = weight_of(model.model.layers[0].mlp.up_proj)
    weight.copy_(1e-7 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)))
    compress_decoder_layers(model, BATCHES, Recipe(pattern="2:4", ignore=("*.self_attn.*", "model.layers.1.*")))
    assert weight.any()
    assert not weight[weight == 0].signbit().any()


def test_it_is_deterministic():
    first, second = random_model("qwen3"), random_model("qwen3")
    for model in (first, second):
        compress_decoder_layers(model, BATCHES, Recipe(pattern="50%"))
    assert equal_weights(first, second)


def test_progress_counts_linear_layers():
    calls: list[tuple[str, int, int]] = []
    recipe = Recipe(pattern="2:4", prune="wanda")
    compress_decoder_layers(random_model("llama"), BATCHES, recipe, progress=lambda *call: calls.append(call))
    assert [done for _, done, _ in calls] == [*range(8), 7, *range(8, 15)]
    assert {total for _, _, total in calls} == {14}
    assert (calls[0][0], calls[-1][0]) == ("decoder layer 1 of 2", "decoder layer 2 of 2")


def test_a_model_pruned_elsewhere_is_checked_and_kept():
    model = random_model("gpt2")
    for linear in linears_of(model).values():
        weight_of(linear)[:, ::2] = 0
    before = copy.deepcopy(model.state_dict())
    reports = compress_decoder_layers(model, [], Recipe(pattern="2:4", prune="none"))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert reports[0] == LayerReport("transformer.h.0.attn.c_attn", "2:4", 0.5, None, "none", 0.0)
    weight_of(linears_of(model)["transformer.h.1.mlp.c_fc"])[7, 4:8] = 1
    with pytest.raises(PatternError, match=r"layer transformer\.h\.1\.mlp\.c_fc: .* row 7, .*block 1"):
        compress_decoder_layers(model, [], Recipe(pattern="2:4", prune="none"))


@pytest.mark.parametrize("prune", ["none", "magnitude", "sparsegpt"])
def test_a_damaged_weight_is_named(prune: str):
    model = random_model("llama")
    weight_of(model.model.layers[0].mlp.up_proj)[2, 3] = float("nan")
    with pytest.raises(InputError, match=r"layer model\.layers\.0\.mlp\.up_proj: the weight holds NaN"):
        compress_decoder_layers(model, BATCHES, Recipe(pattern="24:24", prune=prune, ignore=("*.down_proj",)))


def test_damaged_activations_are_named():
    model = random_model("llama")
    model.model.layers[1].input_layernorm.weight.data[0] = float("inf")
    with pytest.raises(InputError, match=r"layer model\.layers\.1\.self_attn\.[qkv]_proj: .*activations hold NaN"):
        compress_decoder_layers(model, BATCHES, Recipe(pattern="2:4", prune="wanda"))


def test_magnitude_needs_no_calibration():
    dense = random_model("gpt2")
    model = copy.deepcopy(dense)
    reports = compress_decoder_layers(model, [], Recipe(pattern="6:8", prune="magnitude"))
    assert all((report.error, report.outcome) == (None, "magnitude") for report in reports)
    with_text = copy.deepcopy(dense)
    compress_decoder_layers(with_text, BATCHES, Recipe(pattern="6:8", prune="magnitude"))
    assert equal_weights(model, with_text)
    for linear in linears_of(model).values():
        parse_pattern("6:8").check(weight_of(linear))
        assert weight_of(linear).count_nonzero() >= 0.7 * weight_of(linear).numel()


def test_no_calibration_is_refused():
    with pytest.raises(InputError, match="needs calibration text"):
        compress_decoder_layers(random_model("llama"), [], Recipe(prune="wanda"))


def test_all_layers_ignored_is_refused():
    with pytest.raises(InputError, match="no linear layer to prune"):
        compress_decoder_layers(random_model("llama"), BATCHES, Recipe(ignore=("model.*",)))


def test_a_model_without_decoder_layers_is_refused():
    with pytest.raises(InputError, match="no list of decoder layers"):
        compress_decoder_layers(nn.Sequential(nn.Linear(4, 4)), BATCHES, Recipe())


def test_fused_experts_are_left_dense_on_request_only():
    torch.manual_seed(0)
    config = MixtralConfig(vocab_size=VOCABULARY, **_SIZES, num_hidden_layers=2, num_local_experts=4)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with pytest.raises(InputError, match=r"list model\.layers\.0\.mlp\.experts under 'ignore'"):
        compress_decoder_layers(model, BATCHES, Recipe())
    reports = compress_decoder_layers(model, BATCHES, Recipe(pattern="2:4", prune="wanda", ignore=("*.experts",)))
    assert {report.name.rpartition(".")[2] for report in reports} == {"q_proj", "k_proj", "v_proj", "o_proj"}


def test_layers_whose_inputs_are_all_zero_are_announced():
    """Finite embeddings of 1e25: RMSNorm's mean of squares overflows, and all that follows reads zeros."""
    model = random_model("llama", torch.float32)
    model.model.embed_tokens.weight.data[:, 0] = 1e25
    with pytest.warns(UserWarning, match="all its inputs are zero") as caught:
        compress_decoder_layers(model, BATCHES, Recipe(pattern="2:4", search="none"))
    names = {str(warning.message).split(":")[0] for warning in caught}
    assert names == set(linears_of(model))
