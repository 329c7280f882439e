"""Real vLLM engines on a CPU: `make test-vllm`, in an environment of their own."""
