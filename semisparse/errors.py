"""The errors semisparse raises. A message says what was got, what was expected and what to do."""


class SemisparseError(Exception):
    """Something failed that the user can read about; the command line exits with status 1."""


class InputError(SemisparseError):
    """What the user gave is wrong (a path, a key, a file's content); the command line exits with status 2."""


class PatternError(InputError):
    """A pattern cannot be parsed, or a weight does not obey it."""


class FormatError(InputError):
    """A packed weight contradicts its format: a shape, dtype, count, index or bit mask is wrong."""


class CheckpointError(InputError):
    """A model directory is missing, incomplete, of an unknown version or corrupted."""


class RecipeError(InputError):
    """A recipe has an unknown key or an impossible value."""


class KernelError(SemisparseError):
    """No kernel can run this product here; the message lists every candidate's reason."""
