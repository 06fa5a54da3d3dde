"""Device facts and measured rates."""

import torch

from semisparse.runtime import measure
from semisparse.runtime.device import arch_of, cpu_multiplies_int8, device_facts
from semisparse.runtime.measure import measured_rates


def test_a_cpu_is_described():
    facts = device_facts("cpu")
    assert facts.kind == "cpu"
    assert facts.name
    assert facts.sms == torch.get_num_threads()
    assert 1 << 16 < facts.cache_bytes < facts.memory_bytes


def test_architectures_of_hopper_and_later_name_their_own_instructions():
    assert [arch_of(*c) for c in ((8, 0), (8, 9), (9, 0), (10, 0))] == ["sm_80", "sm_89", "sm_90a", "sm_100a"]


def test_rates_are_plausible_and_measured_once(tmp_path, monkeypatch):
    monkeypatch.setenv("SEMISPARSE_CACHE", str(tmp_path))
    rates = measured_rates("cpu")
    assert 1e8 < rates.read_bandwidth < 1e13
    assert set(rates.peaks) == {"tensor fp16", "fp32"} | ({"tensor int8"} if cpu_multiplies_int8() else set())
    assert all(1e8 < peak < 1e16 for peak in rates.peaks.values())
    monkeypatch.setattr(measure, "_measure", lambda *arguments: 1 / 0)
    assert measured_rates("cpu") == rates
