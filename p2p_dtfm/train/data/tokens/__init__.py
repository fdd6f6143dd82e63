"""Tokenizers beside bytes and byte-level pairs: those of Llama's family (`sentence_pieces`)."""
