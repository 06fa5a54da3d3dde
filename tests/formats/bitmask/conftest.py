"""The emulated GPU, for the tests of this folder."""

from tests.cuda_emulator import emulated  # noqa: F401
