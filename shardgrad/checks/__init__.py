"""Refusing or reporting misuse that would train wrong numbers."""
