"""The fixture of the emulated GPU."""

from tests.cuda_emulator import emulated  # noqa: F401
