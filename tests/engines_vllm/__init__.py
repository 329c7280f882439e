"""Real vLLM engines on a CPU: `make test-vllm`, in a separate environment."""
