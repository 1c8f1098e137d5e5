"""Predicts memory, traffic and time of a training step."""
