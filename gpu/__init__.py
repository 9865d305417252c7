"""The torch worker: NVIDIA GPUs first, CPUs too."""
