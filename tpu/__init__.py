"""The JAX worker: TPUs first, CPUs and NVIDIA GPUs too."""
