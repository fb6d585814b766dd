"""Checks that refuse or report misuse that would silently train a wrong model."""
