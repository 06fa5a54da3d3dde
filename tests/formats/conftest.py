"""The weights of these tests are so small that threads would only wait for each other."""

import pytest
import torch

from tests.cuda_emulator import emulated  # noqa: F401


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Beside another process on two cores, two threads take 100 s for what one does in 10."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def nan_filled_memory():
    """Fill new memory with NaN, so that what a kernel leaves out is seen."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
