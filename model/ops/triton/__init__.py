"""The operator set in Triton, for NVIDIA GPUs; nothing here is imported unless asked for.

``ops`` calls kernels by name through a ``launch.Launcher``; ``kernels`` holds them, and needs Triton; ``compile`` makes
cubins of them for a named chip, on any machine.
"""
