"""Faults to plant on purpose: one of each kind, and how more are made."""
