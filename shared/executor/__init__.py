"""Several processes that run one model: the ranks, each with a worker of its own, and the driver
that makes the same calls on all of them.
"""
