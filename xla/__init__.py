"""The torch-xla worker (TPUs, and CPUs through XLA): torch's ops under XLA's compiler."""
