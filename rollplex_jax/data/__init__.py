"""What comes in: rows, media, prompts and the input pipeline."""
