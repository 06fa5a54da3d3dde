"""Adapters to host frameworks."""
