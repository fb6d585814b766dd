"""Diagnosis of hanging collectives and of ranks that differ, from the status of each rank."""
