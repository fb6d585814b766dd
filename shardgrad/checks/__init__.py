"""Misuse that would train wrong numbers, refused or reported."""
