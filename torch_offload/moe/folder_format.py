"""Names in folders of models with coded experts. Needs no transformers."""

QUANT_METHOD = "coded_ternary"
"""``quant_method`` in config.json: the name of the format."""

FORMAT_VERSION = 1
"""``coded_format`` in config.json: what this version writes, and the only one it reads."""

PRE_RELEASE_METHOD = "torch_offload"
"""``quant_method`` of folders that were written before the format was settled."""
