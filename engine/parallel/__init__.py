"""One model over several devices, each with a process of its own (`docs/tensor-parallelism.md`)."""
