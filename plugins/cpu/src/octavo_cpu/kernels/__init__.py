"""C++ kernels: the sources, the built library, and what builds it (`build.py`). `octavo_cpu.native` loads it."""
