"""Faults to plant on purpose, and the catalogue of them."""
