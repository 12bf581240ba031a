"""Built kernels: the files that they are kept in, and their launches."""
