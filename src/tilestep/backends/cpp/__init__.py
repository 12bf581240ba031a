"""C++ for the CPU: source, compiler, launches."""
