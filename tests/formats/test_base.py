"""The code of the contract itself, on a format that only this test has."""

import copy
import pickle
from dataclasses import replace

import pytest
import torch

from semisparse.errors import FormatError, InputError, KernelError, PatternError
from semisparse.formats import Format, Kernel, Packed, Problem, TensorSpec, WeightSpec, get_format, registry
from semisparse.patterns import parse_pattern


def refusing(name: str, reason: str | None, device: str | None = None) -> Kernel:
    return Kernel(name, device, lambda problem: reason, lambda problem: lambda x, packed, bias: x)


PLAIN = Format(
    name="plain",
    version=3,
    summary="the weight as it is, and a count",
    accepts=lambda pattern: None if pattern.density > 0.4 else "too sparse",
    specs=lambda spec: (
        TensorSpec("weight", None, ("N", "K")),
        TensorSpec("ends", torch.int32, ("count+1",)),
    ),
    counts=lambda spec: {"count": int(spec.params["count"])},
    counted=("count",),
    pack_weight=lambda weight, pattern: (
        {"count": 4},
        {"weight": weight, "ends": torch.arange(5, dtype=torch.int32)},
    ),
    unpack=lambda packed: packed.tensors["weight"],
    check_content=lambda packed: None,
)
PACKED = PLAIN.pack(torch.eye(4), "50%")


def problem(device: str = "cpu") -> Problem:
    return Problem(1, PLAIN.structure(PACKED.spec), torch.float32, torch.device(device))


def test_every_folder_is_registered_under_its_own_name():
    assert "bitmask" in registry()
    assert all(get_format(name) is declared for name, declared in registry().items())
    with pytest.raises(InputError, match=r"unknown format 'abacus'; known: .*bitmask"):
        get_format("abacus")


def test_bits_count_every_stored_byte():
    assert PACKED.nbytes == 16 * 4 + 5 * 4
    assert PACKED.bits_per_weight == 8 * 84 / 16


def test_the_first_kernel_that_can_is_taken():
    chosen = replace(
        PLAIN, kernels=(refusing("first", "tired"), refusing("gpu", None, "cuda"), refusing("third", None))
    )
    assert chosen.choose(problem()).name == "third"
    assert chosen.choose(problem("cuda")).name == "gpu"
    assert chosen.choose(problem(), "third").name == "third"
    assert replace(chosen, kernels=chosen.kernels[:2]).choose(problem()).name == "reference"


def test_a_kernel_that_does_not_pay_is_taken_by_name_or_before_the_reference():
    slow = replace(refusing("slow", None), pays=lambda problem: False)
    chosen = replace(PLAIN, kernels=(slow, refusing("fast", None)))
    assert chosen.choose(problem()).name == "fast"
    assert chosen.choose(problem(), "slow").name == "slow"
    assert replace(PLAIN, kernels=(slow, refusing("other", "tired"))).choose(problem()).name == "slow"


def test_a_kernel_asked_for_by_name_is_never_replaced():
    chosen = replace(PLAIN, kernels=(refusing("first", "tired"), refusing("gpu", None, "cuda")))
    with pytest.raises(KernelError, match="first: tired"):
        chosen.choose(problem(), "first")
    with pytest.raises(KernelError, match="gpu: runs on cuda, the operands are on cpu"):
        chosen.choose(problem(), "gpu")
    with pytest.raises(InputError, match="has no kernel 'abacus'; it has auto, first, gpu, reference"):
        chosen.choose(problem(), "abacus")


@pytest.mark.parametrize("count", [None, "four", float("inf"), -2])
def test_a_count_that_is_none_is_refused(count):
    with pytest.raises(FormatError, match="params"):
        PLAIN.validate(Packed(replace(PACKED.spec, params={} if count is None else {"count": count}), PACKED.tensors))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"version": 2}, "version 2 is unknown; this semisparse reads version 3"),
        ({"pattern": parse_pattern("1:4")}, "cannot store pattern 1:4: too sparse"),
        ({"shape": (0, 4)}, "at least 1"),
        ({"shape": (4, 5)}, r"weight is torch.float32 \[4, 4\], expected torch.float32 \[4, 5\]"),
        ({"dtype": torch.float16}, r"expected torch.float16"),
    ],
)
def test_a_declaration_that_the_tensors_contradict_is_refused(changed: dict, message: str):
    with pytest.raises(FormatError, match=message):
        PLAIN.validate(Packed(replace(PACKED.spec, **changed), PACKED.tensors))


def test_missing_tensors_are_refused():
    with pytest.raises(FormatError, match=r"stores \['ends', 'weight'\], got \[\]"):
        PLAIN.validate(Packed(PACKED.spec, {}))


def test_a_spec_is_its_fields_however_it_was_made():
    spec = PACKED.spec
    assert WeightSpec.from_json(spec.json) == spec == replace(spec, params=dict(spec.params))
    assert len({spec, replace(spec, shape=(4, 4)), replace(spec, shape=(5, 4))}) == 2
    assert replace(spec, shape=(5, 4)).json != spec.json
    assert dict(PLAIN.structure(spec).params) == {}
    assert pickle.loads(pickle.dumps(spec)) == copy.deepcopy(spec) == spec
    with pytest.raises(TypeError):
        spec.params["count"] = 5


@pytest.mark.parametrize(
    "broken",
    [
        {"format": None},
        {"version": "1"},
        {"version": True},
        {"pattern": "half"},
        {"pattern": 3},
        {"shape": [4]},
        {"shape": [4, 4.0]},
        {"shape": [True, 4]},
        {"dtype": "int8"},
        {"params": [1]},
        {"params": {"count": None}},
        {"params": {"count": [4]}},
        {"params": {"count": True}},
    ],
)
def test_a_spec_that_cannot_be_read_is_refused(broken: dict):
    with pytest.raises((FormatError, PatternError)):
        WeightSpec.from_dict(PACKED.spec.to_dict() | broken)
    for key in broken:
        with pytest.raises(FormatError, match=key):
            WeightSpec.from_dict({name: value for name, value in PACKED.spec.to_dict().items() if name != key})


@pytest.mark.parametrize(
    ("weight", "pattern", "message"),
    [
        (torch.zeros(2, 2), "1:4", "cannot store pattern 1:4: too sparse"),
        (torch.zeros(2, 2, dtype=torch.int8), "50%", "float16, bfloat16 or float32 weights, got torch.int8"),
        (torch.zeros(2, 0), "50%", r"empty weight \[2, 0\]"),
        (torch.tensor([[0.0, float("inf")]]), "50%", "inf at row 0, column 1"),
    ],
)
def test_a_weight_that_cannot_be_stored_is_refused(weight: torch.Tensor, pattern: str, message: str):
    with pytest.raises(FormatError, match=message):
        PLAIN.pack(weight, pattern)
