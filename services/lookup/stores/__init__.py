"""The served stores: finding, opening, warming, swapping and closing them."""
