"""A small search: models, text and a recipe that take about a second."""

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from semisparse.compress import Recipe
from semisparse.compress.report import LayerReport
from tests.models import VOCABULARY, random_model

TOKENS = 100
REPORT = LayerReport("layer", "50%", 0.5, None, "magnitude", 0.0)
SPARSEGPT = {"prune": "sparsegpt", "refine": "none", "order": "columns", "target": "local"}
"""SparseGPT as published."""


def recipe(search: str = "evolution", pattern: str = "32:64", effort: int = 18, **settings: object) -> Recipe:
    """Wanda unless the settings say otherwise: with SparseGPT the banks take most of the time."""
    of_search = {"pattern": pattern, "search": search, "search_tokens": TOKENS, "search_effort": effort}
    return Recipe(**{"prune": "wanda", **of_search, **settings})


def calibration() -> list[torch.Tensor]:
    """Sequences of two lengths."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, VOCABULARY, (4, length), generator=generator) for length in (20, 30)]


def sharp(model: PreTrainedModel) -> PreTrainedModel:
    """Enlarge a random model's matrices, so that its predictions depend on them: else every KL is near rounding."""
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data *= 6
    return model


def sharp_model(architecture: str = "llama") -> PreTrainedModel:
    return sharp(random_model(architecture))


def regular_model() -> PreTrainedModel:
    """Five decoder layers whose sizes are multiples of 64, as in real models."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 5, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=64, num_key_value_heads=2, **sizes)
    return sharp(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval())


@torch.no_grad()
def mean_kl(dense: PreTrainedModel, sparse: PreTrainedModel, batches: list[torch.Tensor]) -> float:
    """Mean KL(dense || sparse) of float32 models in float64, sequence by sequence, without padding."""
    total, count = 0.0, 0
    for sequence in (row for batch in batches for row in batch):
        p, q = (model.float()(sequence[None]).logits[0, :-1].double().log_softmax(-1) for model in (dense, sparse))
        total += float((p.exp() * (p - q)).sum())
        count += len(sequence) - 1
    return total / count
