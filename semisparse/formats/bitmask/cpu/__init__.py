"""The CPU kernel."""
