"""Transformers: the Trainer callback, the registration of the quantizer, models from folders."""
