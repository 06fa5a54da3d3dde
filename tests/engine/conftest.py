"""The emulated GPU, for the tests of this folder."""

from tests.cuda_emulator import emulated  # noqa: F401
from tests.formats.conftest import nan_filled_memory  # noqa: F401
