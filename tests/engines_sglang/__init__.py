"""A real SGLang server on a CPU: `make test-sglang`, in an environment of its own."""
