"""Tests of draftstore."""
