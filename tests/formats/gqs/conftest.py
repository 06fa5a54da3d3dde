"""The fixture that emulates a GPU."""

from tests.cuda_emulator import emulated

__all__ = ["emulated"]
