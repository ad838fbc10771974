"""What runs on the GPU. Blocks are converted to float32 right after a load, and back at the store."""
