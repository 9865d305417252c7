"""Metrics, gates, and the findings that they give."""
