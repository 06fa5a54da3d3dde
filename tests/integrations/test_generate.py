"""Generation with packed layers: static caches, tracing to one graph, batches and padding. CUDA graphs need a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, StaticCache

from semisparse.integrations.transformers import sparse_layers
from tests.serving import Served, every_format, write

pytestmark = pytest.mark.xdist_group("generate")  # one process makes `models`

SPECIAL = ("searched", "one-kv-head", "bias")
PLAIN = {s.format: s for s in every_format() if s.name not in SPECIAL}
SERVED = {s.name: s for s in (*PLAIN.values(), *every_format()) if s in PLAIN.values() or s.name in SPECIAL}
"""A model of each format, and some more; the contract tests have every variant of a format."""
FORMATS = pytest.mark.parametrize("served", SERVED.values(), ids=SERVED)
TRACED = pytest.mark.parametrize(
    "served",
    [pytest.param(PLAIN["bitmask"], id="bitmask"), pytest.param(SERVED["bias"], id="bias", marks=pytest.mark.slow)],
)
"""Tracing a whole model takes seconds; tests/formats/test_traced_product.py traces a layer of every format."""
GREEDY = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("models")
    return {
        name: AutoModelForCausalLM.from_pretrained(write(served, folder / served.folder), dtype=torch.float32)
        for name, served in SERVED.items()
    }


def prompts(batch: int, length: int = 6) -> Tensor:
    return torch.randint(1, 250, (batch, length), generator=torch.Generator().manual_seed(batch))


@TRACED
def test_a_decoding_step_is_one_graph(served: Served, models: dict[str, PreTrainedModel]):
    model = models[served.name]
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    step = torch.compile(model, fullgraph=True, backend=keep)
    caches = [StaticCache(config=model.config, max_cache_len=16) for _ in range(2)]
    token = torch.full((64, 1), 7)
    with torch.no_grad():
        for cache in caches:
            model(prompts(64), past_key_values=cache)
        compiled, eager = step(token, past_key_values=caches[0]), model(token, past_key_values=caches[1])
    # Attention takes its mask by another way when traced.
    torch.testing.assert_close(compiled.logits, eager.logits, rtol=0, atol=1e-5)
    (graph,) = graphs
    products = [node for node in graph.graph.nodes if "semisparse" in str(node.target)]
    assert len(products) == len(sparse_layers(model))


@FORMATS
def test_generate_with_a_static_cache(served: Served, models: dict[str, PreTrainedModel]):
    model = models[served.name]
    expected = model.generate(prompts(3), max_new_tokens=5, **GREEDY)
    assert torch.equal(model.generate(prompts(3), max_new_tokens=5, cache_implementation="static", **GREEDY), expected)


def test_generate_compiled_with_a_static_cache(models: dict[str, PreTrainedModel]):
    model = models["searched"]
    expected = model.generate(prompts(3), max_new_tokens=5, **GREEDY)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    plain = model.forward
    model.forward = torch.compile(plain, backend="eager", dynamic=True)
    try:
        found = model.generate(prompts(3), max_new_tokens=5, cache_implementation="static", **GREEDY)
    finally:
        model.forward = plain
    assert not torch._dynamo.utils.counters["graph_break"]
    assert torch.equal(found, expected)


@FORMATS
def test_every_row_of_a_batch_is_what_it_is_alone(served: Served, models: dict[str, PreTrainedModel]):
    """Kernels compute batches in different ways; a wrong one would change the greedy tokens."""
    model = models[served.name]
    for batch in (1, 2, 7, 16, 64):
        ids = prompts(batch)
        together = model.generate(ids, max_new_tokens=3, **GREEDY)
        for row in (0, batch - 1):
            assert torch.equal(together[row], model.generate(ids[row : row + 1], max_new_tokens=3, **GREEDY)[0])


@FORMATS
def test_left_padding_changes_nothing(served: Served, models: dict[str, PreTrainedModel]):
    model = models[served.name]
    ids = prompts(2, 7)
    padded, mask = ids.clone(), torch.ones_like(ids)
    padded[0, :3], mask[0, :3] = 0, 0
    together = model.generate(padded, attention_mask=mask, max_new_tokens=4, **GREEDY)
    assert torch.equal(together[0, 7:], model.generate(ids[:1, 3:], max_new_tokens=4, **GREEDY)[0, 4:])
    assert torch.equal(together[1, 7:], model.generate(ids[1:], max_new_tokens=4, **GREEDY)[0, 7:])
