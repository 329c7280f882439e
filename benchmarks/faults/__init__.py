"""The whole system while everything fails that can."""
