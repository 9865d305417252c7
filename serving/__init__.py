"""The front door: `LLM`, the command line, and the text side of requests. Backends are loaded by
name.
"""
