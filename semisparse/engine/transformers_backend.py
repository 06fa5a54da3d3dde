"""Running a model through transformers' own code, for models that the engine's own decoder cannot run."""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel, StaticCache

from semisparse.engine.backend import Backend
from semisparse.engine.sampling import Sampling, choose
from semisparse.errors import InputError
from semisparse.formats.kernel import bucket_of


class TransformersBackend(Backend):
    """A model that transformers runs, with a static cache if the model supports it.

    Args:
        model: on its device.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        config: Any = model.config.get_text_config()
        self.context = int(getattr(config, "max_position_embeddings", None) or 1 << 30)
        self.vocabulary = int(config.vocab_size)
        self._generator = torch.Generator(model.device)

    def needs(self, prompts: Sequence[Sequence[int]], new: int, sampling: Sampling, proposals: int) -> Hashable:
        return bucket_of(len(prompts)), bucket_of(len(prompts) * max(map(len, prompts)))

    def compile(self, prompts: Sequence[Sequence[int]], new: int, proposals: int) -> None:
        """Compile nothing: kernels are compiled where they are first called."""

    @torch.no_grad()
    def run(
        self, prompts: Sequence[Sequence[int]], new: int, sampling: Sampling, proposals: int = 0
    ) -> Iterator[list[int]]:
        """Yield one token per prompt for each of ``new`` steps; shorter prompts are padded on the left.

        ``proposals`` is ignored: there is no speculative decoding here, which would give the same tokens.

        Raises:
            InputError: the model does not keep keys and values in transformers' cache, so that a step with one token
                would not know those before it.
        """
        self._generator.manual_seed(sampling.seed)
        device, longest = self._model.device, max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts], device=device)
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
        cache = self._cache(longest + new)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        for step in range(new):
            output = self._model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            cache = getattr(output, "past_key_values", None)
            if new > 1 and cache is None:
                raise InputError(f"{self._why_no_cache()}; generate with its own `model.generate` of transformers")
            ids = choose(output.logits[:, -1], sampling, self._generator)[:, None]
            yield ids[:, 0].tolist()
            if step + 1 < new:
                mask = torch.cat([mask, mask.new_ones(len(ids), 1)], dim=-1)
                positions = positions[:, -1:] + 1

    def _cache(self, length: int) -> StaticCache | DynamicCache | None:
        """Return an empty cache of transformers; None for a model that makes one of its own class, as MiniMax does."""
        if not self._model._supports_default_dynamic_cache():
            return None
        if getattr(self._model, "_can_compile_fullgraph", False) and not self._has_alibi():
            return StaticCache(config=self._model.config, max_cache_len=length)
        return DynamicCache(config=self._model.config)

    def _why_no_cache(self) -> str:
        """Say why the model has returned no keys and values."""
        name, arguments = type(self._model).__name__, inspect.signature(self._model.forward).parameters
        if "past_key_values" in arguments:
            return f"{name} returns no keys and values for transformers' cache, as an encoder does"
        if "cache_params" in arguments:
            return f"{name} keeps a state instead of keys and values, as state-space models do"
        return f"{name} cannot reuse keys and values: transformers' code of it takes no cache"

    def _has_alibi(self) -> bool:
        """Return whether attention has biases as long as the mask: they do not fit the keys of a static cache."""
        config: Any = self._model.config.get_text_config()
        positions = "position_ids" in inspect.signature(self._model.forward).parameters  # BLOOM takes none
        return bool(getattr(config, "alibi", False)) or not positions
