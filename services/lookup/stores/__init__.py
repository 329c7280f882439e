"""What is served: which stores, opened, warmed, swapped and closed."""
