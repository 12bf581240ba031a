"""The package's version, in a module that imports nothing: kernels' keys and headers name it."""

__version__ = "0.1.0"
