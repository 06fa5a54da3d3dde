"""Which models in memory cannot be compressed."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from semisparse.compress.decoder import decoder_layers, linear_layers
from semisparse.errors import InputError
from semisparse.formats.base import WEIGHT_DTYPES
from semisparse.nn import weight_of


def require_suitable(model: Any) -> None:
    """Refuse a model that is none of transformers', has no head or no values, or holds weights that no format stores.

    Raises:
        InputError: says what to do.
    """
    kind = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise InputError(f"the model is a {kind}; expected a directory, or a causal language model of transformers")
    names, layers = decoder_layers(model)
    if model.get_output_embeddings() is None and not model.can_generate():
        raise InputError(f"{kind} predicts no tokens: load the model with transformers' AutoModelForCausalLM")
    absent = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if absent:
        raise InputError(
            f"{absent[0]} of {kind} is not in memory: give the model's directory, or load it without offloading"
        )
    if len(set(layers)) < len(layers):
        raise InputError(f"{names} of {kind} holds one module several times: save the model and load it again")
    for index, layer in enumerate(layers):
        for name, linear in linear_layers(layer).items():
            dtype = weight_of(linear).dtype
            if dtype not in WEIGHT_DTYPES:
                raise InputError(
                    f"layer {names}.{index}.{name} is {dtype}, and formats store float16, bfloat16 or float32: convert "
                    "the model (`model.to(torch.float32)`) and save it"
                )
