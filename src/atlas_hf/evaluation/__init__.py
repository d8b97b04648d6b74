"""Measuring models: benchmark tasks by lm-eval, and perplexity of texts of any length by streaming."""
