"""What a dense store computes: kernels over plain arrays, no files."""
