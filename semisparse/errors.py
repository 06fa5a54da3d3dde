"""The exceptions that semisparse raises. A message says what was received, what was expected and what to do."""


class SemisparseError(Exception):
    """An operation failed. The command line prints the message and exits with status 1."""


class InputError(SemisparseError):
    """The user's input is invalid: a path, an option, a file's content. The command line exits with status 2."""


class PatternError(InputError):
    """A pattern cannot be parsed, or a weight violates it."""


class FormatError(InputError):
    """A packed weight contradicts its format: a shape, dtype, count, index or bit mask is wrong."""


class CheckpointError(InputError):
    """A model directory is missing, incomplete, corrupted or of an unknown version."""


class RecipeError(InputError):
    """A recipe has an unknown key or an invalid value."""


class KernelError(SemisparseError):
    """No kernel can compute a matmul here, or a kernel cannot be compiled, loaded or launched."""
