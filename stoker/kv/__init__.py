"""KV blocks and where they lie. keys, pool and layout are light: they never import torch."""
