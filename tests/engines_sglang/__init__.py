"""A real SGLang server on a CPU: `make test-sglang`, in a separate environment."""
