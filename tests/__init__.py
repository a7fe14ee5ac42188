"""Tests, laid out by what they need: nothing, real servers, or a broken part."""
