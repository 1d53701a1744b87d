"""Record a forward pass as a program of ATen operations, and run the program again on other weights and inputs."""
