"""The native kernels: C, in one form of arithmetic for every CPU, and their binding."""
