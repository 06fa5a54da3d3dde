"""Fixtures for the tests in the real vLLM package."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def group(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A tensor-parallel group of this process alone."""
    from tests.vllm import ranks

    ranks.start(0, 1, tmp_path_factory.mktemp("group") / "rendezvous")
