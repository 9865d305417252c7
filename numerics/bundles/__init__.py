"""Runs kept on disk: what a bundle holds, written and read."""
