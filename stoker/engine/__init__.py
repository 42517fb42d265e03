"""One model on one device: token ids in, token ids out."""
