"""The CPU kernel of dense."""
