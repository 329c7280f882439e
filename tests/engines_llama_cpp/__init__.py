"""A real llama-server on a CPU: `make test-llama-cpp`, in a separate environment."""
