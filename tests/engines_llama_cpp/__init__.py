"""A real llama-server on a CPU: `make test-llama-cpp`, in an environment of its own."""
