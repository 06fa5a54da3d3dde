"""The version of the package, known also where its source is used without being installed."""

__version__ = "0.1.0"
