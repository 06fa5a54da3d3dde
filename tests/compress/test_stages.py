"""Stages and residual writers of every architecture, against what a person reads in its code."""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Gemma2Config, OPTConfig, PretrainedConfig

from semisparse.compress.blocks import Call, decoder_blocks, linear_layers, record_calls
from semisparse.compress.stages import Point, find_stages, read_stage
from semisparse.errors import InputError
from tests.models import CONFIGS, VOCABULARY, random_model

BATCH = torch.randint(0, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(0))
_SHARED = "self_attn.q_proj self_attn.k_proj self_attn.v_proj"
_LLAMA = [_SHARED, "self_attn.o_proj", "mlp.gate_proj mlp.up_proj", "mlp.down_proj"]
_LLAMA_WRITERS = {
    "self_attn.o_proj": Point("", "input"),
    "mlp.down_proj": Point("post_attention_layernorm", "input"),
}
EXPECTED = {
    "opt": (
        ["self_attn.q_proj self_attn.k_proj self_attn.v_proj", "self_attn.out_proj", "fc1", "fc2"],
        {"self_attn.out_proj": Point("", "input"), "fc2": Point("final_layer_norm", "input")},
    ),
    "gpt2": (
        ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"],
        {"attn.c_proj": Point("", "input"), "mlp.c_proj": Point("ln_2", "input")},
    ),
}


def of_config(config: PretrainedConfig) -> nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def stages_of(model: nn.Module):
    blocks = decoder_blocks(model)[1]
    hidden, calls = record_calls(model, blocks, [BATCH])
    names = {name: f"block.{name}" for name in linear_layers(blocks[0])}
    # Each family asks for the arguments in its own order, so the calls say q, k and v in any order.
    return find_stages(blocks[0], names, calls[0][0], hidden[0]), blocks[0], calls[0][0], hidden[0]


@pytest.mark.parametrize("architecture", CONFIGS)
def test_every_architecture(architecture: str):
    linears, writers = EXPECTED.get(architecture, (_LLAMA, _LLAMA_WRITERS))
    stages = stages_of(random_model(architecture, torch.float32))[0]
    assert [set(stage.linears) for stage in stages] == [set(names.split()) for names in linears]
    assert {name: point for stage in stages for name, point in stage.streams.items()} == writers
    assert all(stage.every_token for stage in stages)


def test_norms_after_the_sum():
    """OPT-350m normalises after each sum: the stream before fc2 is what the first norm gave."""
    sizes = {"hidden_size": 24, "word_embed_proj_dim": 24, "ffn_dim": 44, "num_hidden_layers": 2}
    config = OPTConfig(vocab_size=VOCABULARY, **sizes, num_attention_heads=4, do_layer_norm_before=False)
    streams = {name: p for stage in stages_of(of_config(config))[0] for name, p in stage.streams.items()}
    assert streams == {
        "self_attn.out_proj": Point("", "input"),
        "fc2": Point("self_attn_layer_norm", "output"),
    }


def test_norms_before_the_sum_leave_no_writer():
    """Gemma 2 normalises what o and down give before adding it, so neither adds its own output to the stream."""
    sizes = {"hidden_size": 24, "intermediate_size": 44, "num_hidden_layers": 2, "head_dim": 8}
    config = Gemma2Config(vocab_size=VOCABULARY, **sizes, num_attention_heads=4, num_key_value_heads=2)
    stages = stages_of(of_config(config))[0]
    assert [len(stage.linears) for stage in stages] == [3, 1, 2, 1]
    assert not any(stage.streams for stage in stages)


def test_reading_a_stage_gives_what_passes_there():
    model = random_model("llama", torch.float32)
    stages, block, call, hidden = stages_of(model)
    down = stages[-1]
    seen = read_stage(block, down, call, hidden)
    added = block.mlp.down_proj(seen[down.entry])
    expected = call(block, hidden)
    torch.testing.assert_close((seen[down.streams["mlp.down_proj"]] + added).view_as(expected), expected)


class Odd(nn.Module):
    """A block with experts, each for some of the tokens, a layer used twice and a layer never used."""

    def __init__(self) -> None:
        super().__init__()
        self.expert, self.twice, self.never = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        chosen = hidden[..., 0] > 0
        mixed = torch.zeros_like(hidden)
        if chosen.any():
            mixed[chosen] = self.expert(hidden[chosen])
        return hidden + self.twice(self.twice(mixed))


def test_a_layer_for_some_tokens_is_told_from_one_for_all():
    hidden = torch.randn(1, 20, 8, generator=torch.Generator().manual_seed(0))
    call = Call((), {}, None)
    (stage,) = find_stages(Odd(), {"expert": "m.expert"}, call, hidden)
    assert not stage.every_token
    assert len(read_stage(Odd(), stage, call, hidden)[stage.entry]) == (hidden[..., 0] > 0).sum()
    assert stage.entry not in read_stage(Odd(), stage, call, -hidden.abs())


@pytest.mark.parametrize(("name", "count"), [("never", 0), ("twice", 2)])
def test_a_layer_not_called_once_is_refused(name: str, count: int):
    with pytest.raises(InputError, match=rf"layer m\.{name} is called {count} times.*'ignore'"):
        find_stages(Odd(), {name: f"m.{name}"}, Call((), {}, None), torch.ones(1, 4, 8))
