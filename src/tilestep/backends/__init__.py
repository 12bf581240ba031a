"""From a program to kernels: the rule with its storage formats, one module per backend."""
