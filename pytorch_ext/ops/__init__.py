"""The operators as functions: validation, registration with torch, autograd, choice of backend."""
