"""From plain text to a trained model: reading, tokenizing, packing, training, perplexity. The command line stands on it."""
