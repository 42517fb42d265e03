"""Model parts: attention, MLP, mixture of experts, norms, rotary embeddings, quantised weights."""
