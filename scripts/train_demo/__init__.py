"""Data, tokenizer, training and export of the bundled demo model."""
