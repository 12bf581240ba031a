"""From a program to kernels: storages around the rule, one module a backend."""
