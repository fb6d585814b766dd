"""Fault drills: the training program with injected faults, judged by its reports and what it leaves
behind.
"""
