"""Kernels in C, and the library that they are compiled into."""
