"""Shared inputs and layers that add to the residual stream, per architecture, against its code as read by hand."""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Gemma2Config, OPTConfig, PreTrainedConfig

from semisparse.compress.decoder import LayerCall, decoder_layers, linear_layers, logits_after, record_calls
from semisparse.compress.trace import HookPoint, SharedInput, capture, find_inputs
from semisparse.errors import InputError
from tests.architectures import tiny_model
from tests.models import CONFIGS, VOCABULARY, random_model

BATCH = torch.randint(0, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(0))
QKV = "self_attn.q_proj self_attn.k_proj self_attn.v_proj"
LLAMA = (
    [QKV, "self_attn.o_proj", "mlp.gate_proj mlp.up_proj", "mlp.down_proj"],
    {
        "self_attn.o_proj": HookPoint("", "input"),
        "mlp.down_proj": HookPoint("post_attention_layernorm", "input"),
    },
)
EXPECTED = {
    "opt": (
        [QKV, "self_attn.out_proj", "fc1", "fc2"],
        {"self_attn.out_proj": HookPoint("", "input"), "fc2": HookPoint("final_layer_norm", "input")},
    ),
    "gpt2": (
        ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"],
        {"attn.c_proj": HookPoint("", "input"), "mlp.c_proj": HookPoint("ln_2", "input")},
    ),
}


def model_of(config: PreTrainedConfig) -> nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def traced(model: nn.Module) -> tuple[list[SharedInput], nn.Module, LayerCall, torch.Tensor]:
    """The shared inputs of the first decoder layer, the layer itself, its arguments and its hidden states."""
    layers = decoder_layers(model)[1]
    hidden: list[torch.Tensor] = []
    calls = record_calls(model, layers, [BATCH], hidden.append)
    names = {name: f"layer.{name}" for name in linear_layers(layers[0])}
    return find_inputs(layers[0], names, calls[0][0], hidden[0]), layers[0], calls[0][0], hidden[0]


@pytest.mark.parametrize("architecture", CONFIGS)
def test_every_architecture(architecture: str):
    linears, residuals = EXPECTED.get(architecture, LLAMA)
    inputs = traced(random_model(architecture, torch.float32))[0]
    # Each architecture calls q, k and v in an order of its own.
    assert [set(shared.linears) for shared in inputs] == [set(names.split()) for names in linears]
    assert {name: point for shared in inputs for name, point in shared.residuals.items()} == residuals
    assert all(shared.all_tokens for shared in inputs)


def test_recording_ends_a_forward_at_the_last_decoder_layer(monkeypatch):
    """The final norm of every calibration token would run on a CPU, for nothing."""
    model = random_model("llama", torch.float32)
    monkeypatch.setattr(model.model.norm, "forward", lambda states: pytest.fail("the final norm runs"))
    hidden: list[torch.Tensor] = []
    layers = decoder_layers(model)[1]
    calls = record_calls(model, layers, [BATCH, BATCH[:1]], hidden.append)
    assert [len(own) for own in calls] == [2] * len(layers)
    assert [states.shape[0] for states in hidden] == [2, 1]


def test_recording_decoder_layers_that_return_two_values():
    """Bamba's code unpacks its decoder layers' tuples; others take the first value of a tuple."""
    model = tiny_model("Bamba")
    layers = decoder_layers(model)[1]
    hidden: list[torch.Tensor] = []
    calls = record_calls(model, layers, [BATCH], hidden.append)
    assert [len(own) for own in calls] == [1] * len(layers)
    last = calls[1][0](layers[1], calls[0][0](layers[0], hidden[0]))
    torch.testing.assert_close(logits_after(model, layers, BATCH, last), model(BATCH, use_cache=False).logits)


def test_norms_after_the_sum():
    """OPT-350m normalises after each sum: the residual stream before fc2 is the output of the first norm."""
    sizes = {"hidden_size": 24, "word_embed_proj_dim": 24, "ffn_dim": 44, "num_hidden_layers": 2}
    config = OPTConfig(vocab_size=VOCABULARY, **sizes, num_attention_heads=4, do_layer_norm_before=False)
    residuals = {name: point for shared in traced(model_of(config))[0] for name, point in shared.residuals.items()}
    assert residuals == {
        "self_attn.out_proj": HookPoint("", "input"),
        "fc2": HookPoint("self_attn_layer_norm", "output"),
    }


def test_norms_before_the_sum_leave_no_writer():
    """Gemma 2 normalises the outputs of o_proj and down_proj before it adds them: neither adds its own output."""
    sizes = {"hidden_size": 24, "intermediate_size": 44, "num_hidden_layers": 2, "head_dim": 8}
    config = Gemma2Config(vocab_size=VOCABULARY, **sizes, num_attention_heads=4, num_key_value_heads=2)
    inputs = traced(model_of(config))[0]
    assert [len(shared.linears) for shared in inputs] == [3, 1, 2, 1]
    assert not any(shared.residuals for shared in inputs)


def test_captured_residual_and_output_sum_to_the_layers_output():
    inputs, layer, call, hidden = traced(random_model("llama", torch.float32))
    activations = capture(layer, inputs[-1], call, hidden)
    added = layer.mlp.down_proj(activations[inputs[-1].point])
    expected = call(layer, hidden)
    torch.testing.assert_close((activations[inputs[-1].residuals["mlp.down_proj"]] + added).view_as(expected), expected)


class Odd(nn.Module):
    """A decoder layer with an expert for some of the tokens, a linear layer used twice and one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.expert, self.twice, self.never = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        chosen = hidden[..., 0] > 0
        mixed = torch.zeros_like(hidden)
        if chosen.any():
            mixed[chosen] = self.expert(hidden[chosen])
        return hidden + self.twice(self.twice(mixed))


def test_an_input_of_some_tokens_is_told_from_one_of_all():
    hidden = torch.randn(1, 20, 8, generator=torch.Generator().manual_seed(0))
    call = LayerCall((), {}, None)
    (shared,) = find_inputs(Odd(), {"expert": "m.expert"}, call, hidden)
    assert not shared.all_tokens
    assert len(capture(Odd(), shared, call, hidden)[shared.point]) == (hidden[..., 0] > 0).sum()
    assert shared.point not in capture(Odd(), shared, call, -hidden.abs())


@pytest.mark.parametrize(("name", "count"), [("never", 0), ("twice", 2)])
def test_a_layer_not_called_once_is_refused(name: str, count: int):
    with pytest.raises(InputError, match=rf"layer m\.{name} is called {count} times.*'ignore'"):
        find_inputs(Odd(), {name: f"m.{name}"}, LayerCall((), {}, None), torch.ones(1, 4, 8))
