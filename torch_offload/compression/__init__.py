"""Turns dense experts into coded ones."""
