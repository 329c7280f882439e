"""Token Recycling: a model's own candidates, kept between processes."""
