"""The HTTP routes, one module for each thing that they are about."""
