"""The adapter to transformers: ``AutoModelForCausalLM.from_pretrained(DIR)`` loads a compressed model.

Importing this module registers the checkpoint format. ``import semisparse`` imports it when transformers is imported.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.quantizers.auto import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    register_quantization_config,
    register_quantizer,
)
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from semisparse.checkpoint import (
    DIGESTS,
    METHOD,
    VERSION,
    check_headers,
    check_sizes,
    digests_of,
    is_blake2b,
    placement,
    read_ahead,
    read_block,
    read_headers,
    refuse_integers,
    refuse_unstored,
)
from semisparse.checkpoint.files import weight_files
from semisparse.errors import CheckpointError, InputError, SemisparseError
from semisparse.integrations.names import model_keys, model_layers, stored_keys, stored_layers
from semisparse.integrations.tensor_parallel import gather_state_dict, is_distributed, load_tensors_whole, shard_layers
from semisparse.nn import SparseLinear, dequantise_layers, prepare_experts, replace_linear
from semisparse.nn.sparse_experts import EXPERT_LAYER


class SemisparseConfig(QuantizationConfigMixin):
    """The ``quantization_config`` block as transformers holds it. Unknown keys are kept and written back.

    Keys are not attributes: one such as ``to_dict`` would replace a method.

    Args:
        block: the content of the block.
    """

    def __init__(self, block: Mapping[str, Any]) -> None:
        self.quant_method = METHOD
        self._block = {"version": VERSION, **block, "quant_method": METHOD}

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        config = cls(config_dict)
        return (config, kwargs) if return_unused_kwargs else config

    @property
    def layer_names(self) -> Collection[str]:
        """Names of the packed layers on disk."""
        return self._block.get("layers", {}).keys()

    def rename(self, model: PreTrainedModel, layers: Mapping[str, Any], names: Mapping[str, str]) -> None:
        """Name layers and tensors as ``model`` saves them, if the checkpoint is of a model with another head.

        Args:
            model: has the layers.
            layers: the packed layers, by their names on disk.
            names: their module names, by their names on disk.
        """
        stored = stored_layers(model, {names[name]: packed for name, packed in layers.items()})
        if set(stored.values()) == set(layers):
            return
        entries, dense = self._block["layers"], self._block.get(DIGESTS, {})
        keys = model_keys(model, dense)
        tensors = stored_keys(model, keys.values())
        self._block["layers"] = {stored[names[name]]: entry for name, entry in entries.items()}
        if dense:
            self._block[DIGESTS] = {tensors[name]: dense[key] for key, name in keys.items()}

    def renew_digests(
        self, model: PreTrainedModel, names: Mapping[str, str], state: Mapping[str, Tensor] | None
    ) -> None:
        """Recompute the digests of every layer whose entry has digests, with the algorithm of the present ones.

        That is SHA-256, or BLAKE2b in checkpoints of earlier builds. Checkpoints of the first versions have no digests.

        Args:
            model: contains the layers, joined or not.
            names: module names of the layers, by their names on disk.
            state: tensors by their names in the model; None to take the layers' own.
        """
        entries, tensors = self._block["layers"], dict[tuple[str, str], Tensor]()
        blake = {name for name, entry in entries.items() if is_blake2b(entry.get(DIGESTS))}
        for name, packed in read_block(self._block).items():
            if DIGESTS in entries[name]:
                module = names[name]
                prefix, stored = (f"{module}.", state) if state else ("", model.get_submodule(module).state_dict())
                # Ranks but the first, which writes the config, lack some experts: their tensors are left out.
                here = [tensor for tensor in packed.tensors if prefix + tensor in stored]
                tensors |= {(name, tensor): stored[prefix + tensor] for tensor in here}
                entries[name][DIGESTS] = {}
        for (name, tensor), digest in digests_of(tensors, {key for key in tensors if key[0] in blake}).items():
            entries[name][DIGESTS][tensor] = digest
        dense = self._block.pop(DIGESTS, None)
        if dense is not None and state is None:  # ranks hold slices of dense tensors, which transformers gathers later
            self.renew_dense_digests(model, dense)

    def renew_dense_digests(self, model: PreTrainedModel, stored: Iterable[str]) -> None:
        """Recompute the digests of tensors outside of packed layers.

        Args:
            model: contains the tensors.
            stored: their names on disk. Those that transformers splits or fuses get no digest.
        """
        own = model.state_dict()
        names = {key: name for key, name in model_keys(model, stored).items() if name in own}
        self._block[DIGESTS] = digests_of({key: own[name] for key, name in names.items()})

    def to_dict(self) -> dict[str, Any]:
        return copy.deepcopy(self._block)

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        yield from self.to_dict().items()


class SemisparseQuantizer(HfQuantizer):
    """Replaces the declared layers before the weights are loaded; then validates, shards and arranges them."""

    def __init__(self, quantization_config: SemisparseConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self._shapes: dict[str, torch.Size] = {}
        if not self.pre_quantized:
            raise SemisparseError(
                "semisparse does not compress while loading: run `semisparse compress MODEL --out DIR` and load DIR"
            )

    def update_attn_implementation(self, config: PretrainedConfig) -> PretrainedConfig:
        """Refuse a config before the model is built. This is the first method to which transformers passes it."""
        check_sizes(config.to_dict(), config.name_or_path)
        return config

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> None:
        layers = read_block(self.quantization_config.to_dict())
        files = [Path(file) for file in checkpoint_files or ()]
        if files:
            _refuse_other_directories(files, Path(model.config.name_or_path))
            headers = read_headers(files)
            check_headers(layers, headers)
            read_ahead(files)
        names = model_layers(model, layers)
        self.quantization_config.rename(model, layers, names)
        prepare_experts(model, names.values())
        for name, packed in layers.items():
            try:
                replace_linear(model, names[name], packed)
            except SemisparseError as error:
                raise CheckpointError(f"config.json does not fit the model: {error}") from error
        if files:
            refuse_unstored(model, sum(header.nbytes for header in headers.values()))
        load_tensors_whole(model, sparse_layers(model))
        self._shapes = {name: parameter.shape for name, parameter in model.named_parameters()}

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        layers, device = sparse_layers(model), placement()
        for name, module in layers.items():
            if module.packed.device.type == "meta":
                raise InputError(
                    f"layer {name} was to be offloaded to disk, which packed weights cannot be: give a device_map "
                    "without disk"
                )
            module.requires_grad_(False)  # transformers makes every floating-point parameter require gradients
            if device is not None:
                module.place(device)
            try:
                module.validate()
            except SemisparseError as error:
                raise CheckpointError(f"layer {name}: {error}") from error
        refuse_integers(model, layers)
        if not is_distributed(model):  # ranks hold slices of dense tensors
            self._refuse_other_shapes(model)
        shard_layers(model, layers)
        for layer in layers.values() if device is None else ():
            if layer.packed.device.type != "meta":  # on meta are the experts that other ranks hold
                layer.arrange()

    def _refuse_other_shapes(self, model: PreTrainedModel) -> None:
        """Refuse a tensor that has another shape than before it was loaded: transformers 5.17 takes it, 5.23 does not.

        Raises:
            CheckpointError: names the tensor and both shapes.
        """
        for name, parameter in model.named_parameters():
            expected = self._shapes.get(name, parameter.shape)
            if parameter.shape != expected:
                raise CheckpointError(
                    f"tensor {name} is {list(parameter.shape)}, the model of config.json has {list(expected)}"
                )

    def get_state_dict_and_metadata(self, model: PreTrainedModel) -> tuple[dict[str, Tensor] | None, dict[str, str]]:
        """Renew the digests in the model's config, which transformers writes next."""
        declared = read_block(self.quantization_config.to_dict())
        names, state = model_layers(model, declared), None
        if is_distributed(model):
            by_module = {names[name]: packed for name, packed in declared.items()}
            state = gather_state_dict(model, by_module, sparse_layers(model))
        model.config.quantization_config.renew_digests(model, names, state)
        return state, {}

    def _dequantize(self, model: PreTrainedModel, dtype: torch.dtype | str | None = None) -> PreTrainedModel:
        """Replace packed layers by dense ones, and cast the model: what ``model.dequantize()`` calls."""
        # After save_pretrained has been called, transformers passes the dtype as a string.
        dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype or model.dtype
        dequantise_layers(model, dtype)
        # Cast only stored tensors, as loading does: model.to(dtype) also rounds the frequencies of rotary embeddings.
        for tensor in model.state_dict(keep_vars=True).values():
            if tensor.is_floating_point():
                tensor.data = tensor.data.to(dtype)
        return model

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return False

    @property
    def is_compileable(self) -> bool:
        """Whether a forward traces in one graph: experts do not, because the router chooses them by the data."""
        return not any(EXPERT_LAYER.fullmatch(name) for name in self.quantization_config.layer_names)


def _refuse_other_directories(files: list[Path], directory: Path) -> None:
    """Refuse an index that names files outside the model's directory, which transformers would read.

    Args:
        files: the paths that transformers made of the directory and the names in its index.
        directory: as the user wrote it, perhaps with ``..``; for a model of the Hub it is no directory.
    """
    local = directory.is_dir()
    names = [file.relative_to(directory) if local and file.is_relative_to(directory) else file for file in files]
    inside = not local or all(file.is_relative_to(directory) for file in files)
    if not inside or any(".." in name.parts for name in names) or len({file.parent for file in files}) > 1:
        raise CheckpointError(
            f"the checkpoint's index names files of several directories: {', '.join(sorted(map(str, files)))}"
        )


def sparse_layers(model: nn.Module) -> dict[str, SparseLinear]:
    """Return a model's compressed layers by module name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, SparseLinear)}


def add_dense_digests(model: PreTrainedModel, directory: Path) -> None:
    """Write digests of the tensors outside of packed layers to config.json.

    Args:
        model: the compressed model.
        directory: as the model's ``save_pretrained`` wrote it.
    """
    config = model.config.quantization_config
    headers = read_headers(weight_files(directory))
    config.renew_dense_digests(model, [key for key in headers if key.rpartition(".")[0] not in config.layer_names])
    model.config.save_pretrained(directory)


def mark_compressed(model: PreTrainedModel, block: Mapping[str, Any]) -> dict[str, Any]:
    """Make ``save_pretrained`` write a model whose layers were replaced in memory as a compressed checkpoint.

    Args:
        model: contains a `SparseLinear` for every entry of the block.
        block: the ``quantization_config`` block, with the layers by module name.
    Returns:
        The block with the layers by their names on disk.
    """
    packed = {name: layer.packed for name, layer in sparse_layers(model).items()}
    names = stored_layers(model, packed)
    block = {**block, "layers": {names[name]: entry for name, entry in block["layers"].items()}}
    quantizer = SemisparseQuantizer(SemisparseConfig.from_dict(dict(block)))
    model.hf_quantizer = quantizer
    quantizer.postprocess_model(model)
    return block


if METHOD not in AUTO_QUANTIZATION_CONFIG_MAPPING:
    register_quantization_config(METHOD)(SemisparseConfig)
    register_quantizer(METHOD)(SemisparseQuantizer)
