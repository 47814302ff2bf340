"""Models that are folders of config.json, safetensors and a tokenizer, as the hub has them."""
