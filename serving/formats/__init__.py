"""Reasoning and tool calls in what a model writes, as events for a client's stream."""
