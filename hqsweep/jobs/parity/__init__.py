"""The parity job: kernels against references, to the byte."""
