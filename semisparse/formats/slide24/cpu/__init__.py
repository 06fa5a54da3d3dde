"""The CPU kernel of slide24."""
