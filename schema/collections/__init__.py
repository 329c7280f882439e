"""Collections: named sets of sources that stores are made from, and what was taken down from them."""
